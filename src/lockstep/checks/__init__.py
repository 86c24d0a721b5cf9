"""What could go wrong in silence, looked for: replicas that differ, parameters without gradients, ranks that were set up differently."""
