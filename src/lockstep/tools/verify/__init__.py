"""Check that a task gives the same bits at any number of workers; if not, say what differs first
and why.
"""
