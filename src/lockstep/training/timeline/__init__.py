"""Where each rank's time went, as a training has left it in RUN/anatomy/rank-R.jsonl. No torch
here.
"""
