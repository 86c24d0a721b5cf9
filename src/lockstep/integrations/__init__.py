"""Lockstep inside of other programs that start ranks."""
