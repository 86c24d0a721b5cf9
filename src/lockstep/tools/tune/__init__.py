"""Find the settings that run a task fastest on this machine: the values to try, the search, and how
a trial is timed.
"""
