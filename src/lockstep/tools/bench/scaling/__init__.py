"""Speedup and efficiency of more workers: measured at several numbers of workers in turns, and
compared with a prediction.
"""
