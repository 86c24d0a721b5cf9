"""Which settings run a task fastest on this machine: what can be tried, a search over it, and
how a try is timed.
"""
