"""Moving tensors between ranks; knows no models. `all_reduce`, `broadcast` and `all_gather` are for users."""

from lockstep.collectives.api import all_gather, all_reduce, broadcast
from lockstep.collectives.group import Group, Work

__all__ = ["Group", "Work", "all_gather", "all_reduce", "broadcast"]
