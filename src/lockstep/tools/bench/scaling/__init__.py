"""How much faster more workers are: speedup and efficiency, measured at several numbers of
workers in turns, beside what was foretold.
"""
