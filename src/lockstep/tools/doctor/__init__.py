"""`lockstep doctor`: is this host, or are these hosts, fit to train?"""
