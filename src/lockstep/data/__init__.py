"""Which sample, when, where. Takes rank and size as integers and knows no World."""
