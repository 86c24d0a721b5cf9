"""A look at what a Loader will do, without training: who gets what, and whether random draws are
keyed.
"""
