"""What exact mode can be combined with, and what must be refused."""

from __future__ import annotations

from torch import nn

from lockstep.collectives.group import Group
from lockstep.data.windows import BY_RANKS, Window
from lockstep.errors import UsageError
from lockstep.gradients.exact.fold import Tree
from lockstep.gradients.exact.in_memory import ExactInMemory
from lockstep.gradients.exact.over_network import ExactOverNetwork
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import REDUCTIONS

_CARRIERS = ("auto", "native", "shared_memory")


def exact_reducer(model: nn.Module, reduce: str, group: Group, bucket_bytes: int) -> Reducer:
    """A Reducer that adds along the tree. "auto" goes through shared memory where the ranks have it. Raises UsageError."""
    if reduce not in _CARRIERS:
        if reduce in REDUCTIONS:
            raise UsageError(
                f"reduce={reduce!r} with exact: it adds in an order of its own; leave it out, or choose native or shared_memory"
            )
        raise UsageError(f"reduce={reduce!r} is unknown: choose one of {', '.join(_CARRIERS)}")
    in_memory = reduce != "native" and group.size > 1 and (reduce == "shared_memory" or group.memory is not None)
    reduction = ExactInMemory(group) if in_memory else ExactOverNetwork(group)
    return Reducer(model, group, reduction, fold=Tree(reduction), bucket_bytes=bucket_bytes)


def check_window(window: object) -> Window:
    """Raise a UsageError for what is no window of numbered micro-batches, or one that is cut by the number of ranks."""
    if not isinstance(window, Window):
        raise UsageError(
            f"exact=True adds micro-batches in the order of their slots, which a {type(window).__name__} does not have: walk the windows of a "
            "lockstep.Loader(global_batch=..., micro_batch=...)"
        )
    if window.recipe.get(BY_RANKS):
        raise UsageError(
            "exact=True, but the Loader cuts its data by the number of ranks: give it global_batch and micro_batch (and, for a stream, "
            "sharding='items')"
        )
    return window
