"""Compute steps of a recorded run again: `lockstep replay`."""
