"""Iterable-style data sets: streams cut into the same windows as data sets with random access."""
