"""Train a task, evaluate it, and record the training."""
