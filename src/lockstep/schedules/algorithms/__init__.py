"""The algorithms by name: pure functions of the world size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from lockstep.config.knob import chosen, whole
from lockstep.errors import UsageError
from lockstep.schedules.algorithms import moving, ring_tree_halving
from lockstep.schedules.schedule import Kind, Schedule

Algorithm = Literal[
    "auto",
    "native",
    "central",
    "ring",
    "tree",
    "recursive_doubling",
    "halving_doubling",
    "direct",
    "hierarchical",
    "doubling",
    "halving",
    "shared_memory",
]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

SMALL_ALL_REDUCE = 64 * 2**10
"""The largest number of bytes for which "auto" takes recursive doubling: point-to-point messages
over gloo cost less than gloo's own all-reduce.
"""

ROOTED: tuple[Kind, ...] = ("broadcast", "reduce", "scatter", "gather")

# Functions of the world size, and of the root if the collective has one.
_BY_KIND: dict[Kind, dict[str, Callable[..., Schedule]]] = {
    "all_reduce": {
        "central": ring_tree_halving.central,
        "ring": ring_tree_halving.ring,
        "tree": ring_tree_halving.tree,
        "recursive_doubling": ring_tree_halving.recursive_doubling,
        "halving_doubling": ring_tree_halving.halving_doubling,
        "direct": ring_tree_halving.direct,
        "hierarchical": ring_tree_halving.hierarchical,
    },
    "broadcast": {"central": partial(moving.flat, "broadcast"), "tree": moving.binomial_broadcast},
    "scatter": {"central": partial(moving.flat, "scatter"), "tree": moving.binomial_scatter},
    "all_gather": {
        "ring": moving.ring_all_gather,
        "doubling": moving.doubling_all_gather,
        "direct": moving.direct_all_gather,
    },
    "all_to_all": {"direct": moving.direct_all_to_all},
    # these run a schedule backwards: what spread data now collects it
    "reduce": {
        "central": lambda *size: moving.flat("broadcast", *size).reversed("reduce", in_order=True),
        "tree": lambda *size: moving.binomial_broadcast(*size).reversed("reduce"),
    },
    "gather": {
        "central": lambda *size: moving.flat("scatter", *size).reversed("gather", in_order=True),
        "tree": lambda *size: moving.binomial_scatter(*size).reversed("gather"),
    },
    "reduce_scatter": {
        "ring": lambda world: moving.ring_all_gather(world).reversed("reduce_scatter"),
        "halving": lambda world: moving.doubling_all_gather(world).reversed(
            "reduce_scatter", "halving"
        ),
        "direct": lambda world: moving.direct_all_gather(world).reversed(
            "reduce_scatter", in_order=True
        ),
    },
}


def algorithms_of(kind: Kind) -> list[str]:
    """The names of the written-out algorithms of a collective.

    Args:
        kind: "all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", ...
    """
    return list(_BY_KIND[kind])


def choose_algorithm(kind: Kind, bytes: int, world: int) -> str:
    """Return the algorithm that "auto" stands for, without shared memory. It depends on the call
    only, so all ranks choose alike.
    """
    if world > 1 and kind == "all_reduce" and bytes <= SMALL_ALL_REDUCE:
        return "recursive_doubling"
    return "native"


def check_root(root: int, size: int) -> None:
    """Raise a UsageError if `root` is no rank of a group of this size."""
    if not 0 <= root < size:
        raise UsageError("root-outside-group", root=root, size=size, last=size - 1)


def check_algorithm(kind: Kind, name: str, *others: str) -> None:
    """Raise a UsageError unless `name` is a written-out algorithm of this collective or one of
    `others`.
    """
    choices = [*others, *algorithms_of(kind)]
    if name not in choices:
        raise UsageError("unknown-algorithm", algorithm=name, kind=kind, choices=choices)


def schedule(
    kind: Kind, algorithm: str, world: int, *, root: int = 0, ranks_per_node: int | None = None
) -> Schedule:
    """Return the schedule of that name.

    Args:
        kind: the collective, such as "all_reduce".
        algorithm: a name of `algorithms_of(kind)`.
        world: the number of ranks.
        root: the rank that has, or gets, the tensor.
        ranks_per_node: g, for "hierarchical": ranks 0 .. g-1 share node 0, and so on.

    Raises UsageError for an unknown name, a world size below 1 and a root outside it.
    """
    chosen("kind", kind, _BY_KIND)
    whole("world", world)
    check_root(root, world)
    check_algorithm(kind, algorithm)
    more = [root] if kind in ROOTED else []
    if algorithm == "hierarchical":
        more = [whole("ranks_per_node", ranks_per_node)]
    return _BY_KIND[kind][algorithm](world, *more)
