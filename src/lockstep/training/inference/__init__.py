"""A trained model on data: metrics that count every sample once, and rows in the order of the
data set.
"""
