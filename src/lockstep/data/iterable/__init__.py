"""Iterable-style data sets: streams are cut into windows as data sets with random access are."""
