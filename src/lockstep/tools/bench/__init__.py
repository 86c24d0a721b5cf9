"""Benchmarks of Lockstep's speed and memory."""
