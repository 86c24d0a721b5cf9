"""Which process this is: its environment, its lifetime, its status page, its clock, its random
streams.
"""
