"""From every micro-batch's `.grad` to one sum that all ranks share."""
