"""`lockstep doctor`: check whether one host or several are fit to train."""
