"""From one sum of gradients to new parameters."""
