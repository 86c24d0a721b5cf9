"""Gradients summed along one tree over the slots of a step: the same bits on any number of ranks."""
