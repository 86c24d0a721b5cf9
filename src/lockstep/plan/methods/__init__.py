"""Ways to train the same task, beside each other, and beside what was measured."""
