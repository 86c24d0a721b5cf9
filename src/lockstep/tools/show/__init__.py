"""Pictures of what runs."""
