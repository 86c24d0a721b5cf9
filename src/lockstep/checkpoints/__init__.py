"""Checkpoints: a training's state on disk as tensors and JSON, with nothing pickled."""
