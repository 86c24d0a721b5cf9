"""Turns one sum of gradients into new parameters."""
