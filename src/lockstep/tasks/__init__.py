"""Bundled tasks: real data that every machine has."""
