"""Several hosts: an agent on each, one meeting on the first, generations that all of them take part in."""
