"""The configuration of a training: the task, its distribution over ranks, and how it is run."""
