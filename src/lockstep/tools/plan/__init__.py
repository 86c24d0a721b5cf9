"""Predicts the cost of a training before it runs: bytes and time from formulas and measurements."""
