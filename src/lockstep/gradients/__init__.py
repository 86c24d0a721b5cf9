"""Turns every micro-batch's `.grad` into one sum that all ranks share."""
