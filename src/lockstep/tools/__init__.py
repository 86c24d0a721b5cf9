"""Looks at, measures and predicts trainings. Nothing of the core or of training/ imports it."""
