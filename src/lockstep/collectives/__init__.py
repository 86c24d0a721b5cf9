"""Moving tensors between ranks; knows no models. The functions are for users: see api.py for what they have in common."""

from lockstep.collectives.api import all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter
from lockstep.collectives.group import Group, Work

__all__ = ["Group", "Work", "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]
