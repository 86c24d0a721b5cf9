"""The one order in which exact mode adds: a balanced binary tree over the slots of a step, whatever
rank holds which of them.

    slots      0   1   2   3   4   5          six micro-batches
                \\ /     \\ /     \\ /
                 *       *       *            blocks: aligned, of 2 slots
                  \\     /        |
                     *            |           of 4; what a short step leaves empty is absent, and not zero
                      \\_________/
                           *

A rank with slots 3, 4, 5 can add up 4 and 5, and not 3: it brings the blocks [3] and [4, 5].
Whoever has all blocks of all ranks can finish the tree. Everything here is a pure function of
integers, so that every rank knows what every other one brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.collectives.reduce_op import COMBINE

ABSENT = -0.0
"""x + -0.0 is x to the last bit, for every x, and x + 0.0 is not (for -0.0): what nobody has
adds up to this.
"""


class Block(NamedTuple):
    """Slots [first, first + size): `size` is a power of two and divides `first`."""

    first: int
    size: int


class Turn(NamedTuple):
    """What one slot does to a rank's stack of blocks."""

    level: int
    """Where on the stack its gradient goes."""
    fresh: bool
    """Onto an empty place; else it is added to its left neighbour, which lies there."""
    carries: int
    """How often the stack's top is then added to what lies under it."""


@lru_cache(maxsize=256)
def turns(slots: range) -> tuple[Turn, ...]:
    """What a rank does with consecutive slots, one after the other: a binary counter that adds
    blocks as soon as they are neighbours.
    """
    return _walk(slots)[0]


@lru_cache(maxsize=256)
def blocks(slots: range) -> tuple[Block, ...]:
    """The blocks that a rank brings, in the order of their slots: the largest aligned ones that
    tile its range.
    """
    return _walk(slots)[1]


def _walk(slots: range) -> tuple[tuple[Turn, ...], tuple[Block, ...]]:
    found: list[Turn] = []
    stack: list[Block] = []
    for slot in slots:
        stack.append(Block(slot, 1))
        merged = 0
        while len(stack) > 1 and _neighbours(stack[-2], stack[-1]):
            first, size = stack[-2]
            stack[-2:] = [Block(first, 2 * size)]
            merged += 1
        fresh = merged == 0
        found.append(Turn(len(stack) - 1 + max(0, merged - 1), fresh, max(0, merged - 1)))
    return tuple(found), tuple(stack)


def _neighbours(left: Block, right: Block) -> bool:
    """Whether the two are the halves of one block."""
    return (
        left.size == right.size
        and left.first + left.size == right.first
        and left.first % (2 * left.size) == 0
    )


def levels(slots: range) -> int:
    """How many places a rank's stack needs."""
    return max((turn.level + 1 for turn in turns(slots)), default=0)


Term = int | tuple["Term", "Term"]
"""A block's number in a list, or the sum of two terms."""


@lru_cache(maxsize=256)
def tree(every: tuple[Block, ...]) -> Term:
    """How the blocks of all ranks add up. They tile slots 0 .. n - 1."""
    assert every, "a step has at least one micro-batch"
    in_order = sorted(every)
    ends = [block.first + block.size for block in in_order]
    end = ends[-1]
    assert [block.first for block in in_order] == [0, *ends[:-1]]
    places = {block: number for number, block in enumerate(every)}
    size = 1
    while size < end:
        size *= 2
    found = _term(Block(0, size), places, end)
    assert found is not None
    return found


def _term(block: Block, places: dict[Block, int], end: int) -> Term | None:
    if block in places:
        return places[block]
    if block.first >= end:
        return None
    half = block.size // 2
    left = _term(Block(block.first, half), places, end)
    right = _term(Block(block.first + half, half), places, end)
    if left is None or right is None:
        return left if right is None else right
    return left, right


def nearest_first(brought: Sequence[Sequence[Block]]) -> bool:
    """Whether recursive halving over the ranks, nearest first, adds the blocks that each brings
    along the tree: a power of two of ranks with one block each, of one size. The last may have
    less, or nothing.
    """
    ranks = len(brought)
    share = max(block.size for each in brought for block in each)
    return ranks & (ranks - 1) == 0 and all(
        len(each) <= 1 and all(block.first == rank * share for block in each)
        for rank, each in enumerate(brought)
    )


@lru_cache(maxsize=256)
def tree_of(count: int) -> Term:
    """How so many tensors add up: ((0+1)+(2+3))+..."""
    return tree(tuple(Block(number, 1) for number in range(count)))


def add_up(term: Term, tensors: Sequence[Tensor], out: Tensor, op: str = "sum") -> None:
    """The sum (product, ...) into `out`, which may be one of the tensors. Each addition is rounded
    to their dtype.
    """
    if isinstance(term, int):
        if tensors[term].data_ptr() != out.data_ptr():
            out.copy_(tensors[term])
        return
    combine = COMBINE[op]
    left, right = term
    combine(_value(left, tensors, combine), _value(right, tensors, combine), out=out)


def _value(term: Term, tensors: Sequence[Tensor], combine: Callable[..., Tensor]) -> Tensor:
    if isinstance(term, int):
        return tensors[term]
    left, right = term
    return combine(_value(left, tensors, combine), _value(right, tensors, combine))


def fold(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """One tensor of each rank combined into `out`, the same way on every rank. Half precision is
    added in float32.
    """
    if out.dtype in (torch.float16, torch.bfloat16):
        wide = [part.to(torch.float32) for part in parts]
        fold(wide, op, wide[0])
        out.copy_(wide[0])
        return
    add_up(tree_of(len(parts)), parts, out, op)
    if op == "mean":
        out.div_(len(parts))


def add_rows(rows: Tensor) -> Tensor:
    """The sum along the tree of the rows of a tensor, of which there is at least one: shape [n,
    ...] gives [...].
    """
    found = torch.empty_like(rows[0])
    add_up(tree_of(len(rows)), rows.unbind(), found)
    return found
