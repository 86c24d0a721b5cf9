"""What is left of a training on disk: tensors and JSON, nothing pickled."""
