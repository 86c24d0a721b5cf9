"""An asynchronous parameter server on rank 0, with bounded staleness.

schedule   pure decisions: which rank computes which slots next, and when all ranks synchronize
server     rank 0: the parameters, the user's optimizer over them, a thread for each other rank
messages   what rank 0 and another rank send to each other
worker     every rank: draw slots, pull parameters, push gradients, synchronize
"""
