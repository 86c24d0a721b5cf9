"""Which rank loads which sample, and when. Rank and size are integers here, not a World."""
