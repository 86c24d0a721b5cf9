"""A model laid over a mesh of ranks, on torch's engines: what each rank holds of it, and how it
is run.
"""
