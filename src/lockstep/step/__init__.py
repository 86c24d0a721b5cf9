"""One optimizer step: Stepper, DistributedDataParallel, and their checkpoints."""
