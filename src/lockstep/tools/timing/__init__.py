"""How a piece of work is timed fairly."""
