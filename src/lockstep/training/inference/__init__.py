"""Apply a trained model to data: metrics that count every sample once, and predictions in the order
of the data set.
"""
