"""Algorithms of collectives as data: rounds of transfers, a proof of their result, and their time on a
modelled network. Nothing here needs torch.
"""
