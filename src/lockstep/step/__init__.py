"""One optimizer step: Stepper, DistributedDataParallel and what they keep."""
