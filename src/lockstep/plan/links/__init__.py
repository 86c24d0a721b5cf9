"""What connects ranks, and what a collective costs there."""
