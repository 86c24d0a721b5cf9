"""A task trained, evaluated and recorded."""
