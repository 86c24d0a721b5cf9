"""Every choice of a training: the task, how it is spread over ranks, how it is run."""
