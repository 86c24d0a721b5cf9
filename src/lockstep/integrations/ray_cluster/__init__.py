"""One run on the nodes of a Ray cluster. Ray says which nodes there are; this package decides what
they do.
"""
