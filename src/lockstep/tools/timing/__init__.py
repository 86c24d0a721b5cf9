"""Fair timing of a piece of work."""
