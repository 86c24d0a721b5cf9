"""Every algorithm by its name: pure functions of the world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from lockstep.collectives.algorithms import moving, reducing
from lockstep.collectives.schedule import Kind, Schedule
from lockstep.errors import UsageError

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

_Build = Callable[[int, int], Schedule]  # (world, root) -> Schedule

_BY_KIND: dict[Kind, dict[str, _Build]] = {
    "all_reduce": {
        "central": lambda world, root: reducing.central(world),
        "ring": lambda world, root: reducing.ring(world),
        "tree": lambda world, root: reducing.tree(world),
        "recursive_doubling": lambda world, root: reducing.recursive_doubling(world),
        "halving_doubling": lambda world, root: reducing.halving_doubling(world),
        "direct": lambda world, root: reducing.direct(world),
    },
    "broadcast": {
        "central": lambda world, root: moving.flat("broadcast", world, root),
        "tree": moving.binomial_broadcast,
    },
    "reduce": {
        "central": (
            lambda world, root: moving.flat("broadcast", world, root).reversed(
                "reduce", in_order=True
            )
        ),
        "tree": lambda world, root: moving.binomial_broadcast(world, root).reversed("reduce"),
    },
    "scatter": {
        "central": lambda world, root: moving.flat("scatter", world, root),
        "tree": moving.binomial_scatter,
    },
    "gather": {
        "central": (
            lambda world, root: moving.flat("scatter", world, root).reversed(
                "gather", in_order=True
            )
        ),
        "tree": lambda world, root: moving.binomial_scatter(world, root).reversed("gather"),
    },
    "all_gather": {
        "ring": lambda world, root: moving.ring_all_gather(world),
        "doubling": lambda world, root: moving.doubling_all_gather(world),
        "direct": lambda world, root: moving.direct_all_gather(world),
    },
    "reduce_scatter": {
        "ring": lambda world, root: moving.ring_all_gather(world).reversed("reduce_scatter"),
        "halving": (
            lambda world, root: moving.doubling_all_gather(world).reversed(
                "reduce_scatter", "halving"
            )
        ),
        "direct": (
            lambda world, root: moving.direct_all_gather(world).reversed(
                "reduce_scatter", in_order=True
            )
        ),
    },
    "all_to_all": {
        "direct": lambda world, root: moving.direct_all_to_all(world),
    },
}


def algorithms_of(kind: Kind) -> list[str]:
    """The names of the written-out algorithms of a collective."""
    return [*_BY_KIND[kind], *(["hierarchical"] if kind == "all_reduce" else [])]


def schedule(
    kind: Kind, algorithm: str, world: int, *, root: int = 0, ranks_per_node: int | None = None
) -> Schedule:
    """The schedule of that name. `ranks_per_node` is for "hierarchical": ranks 0 .. g-1 share node
    0, and so on.

    Raises UsageError for an unknown name, a world size below 1 and a root outside it.
    """
    if kind not in _BY_KIND:
        raise UsageError(f"collective {kind!r} is unknown: choose one of {', '.join(_BY_KIND)}")
    if world < 1 or not 0 <= root < world:
        raise UsageError(
            f"world={world} and root={root}: there is at least one rank, and the root is one of"
            " them"
        )
    if algorithm == "hierarchical" and kind == "all_reduce":
        if ranks_per_node is None or ranks_per_node < 1:
            raise UsageError(
                f"ranks_per_node={ranks_per_node}: a hierarchical all-reduce needs to know how many"
                " ranks share a node"
            )
        return reducing.hierarchical(world, ranks_per_node)
    if algorithm not in _BY_KIND[kind]:
        raise UsageError(
            f"algorithm={algorithm!r} is unknown for {kind}: choose one of auto, native,"
            f" {', '.join(algorithms_of(kind))}"
        )
    return _BY_KIND[kind][algorithm](world, root)
