"""Checks for what goes wrong silently: replicas that differ, parameters without gradients, ranks
that were set up differently.
"""
