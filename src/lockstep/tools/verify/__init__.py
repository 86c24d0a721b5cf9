"""Whether the same task gives the same bits at any number of workers; where not, what differs
first, and why.
"""
