"""Facts about this process: its environment, its lifetime, its status page, its clock and its
random streams.
"""
