"""The order of addition of exact mode: a balanced binary tree over the slots of a step. It does not
depend on which rank holds which slots.

    slots      0   1   2   3   4   5          six micro-batches
                \\ /     \\ /     \\ /
                 *       *       *            blocks of 2 slots, aligned
                  \\     /        |
                     *            |           blocks of 4; slots past the end are absent, not zero
                      \\_________/
                           *

A rank with slots 3, 4, 5 can add 4 and 5, but not 3: it contributes the blocks [3] and [4, 5]. A
rank that has the blocks of all ranks can finish the tree. The tree is a pure function of integers,
so every rank knows which blocks the others contribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.collectives.reduce_op import COMBINE

ABSENT = -0.0
"""The value of a sum without terms: x + -0.0 is x to the last bit for every x. x + 0.0 is not, for
x = -0.0.
"""
BLOCK = 1024
"""Number of elements. Slices of a tensor begin at a multiple of it, so that results computed block
by block do not depend on the number of ranks.
"""


@lru_cache(maxsize=4096)  # asked for each bucket in each step
def slice_of(numel: int, rank: int, size: int) -> range:
    """Return one rank's elements of `numel`: whole blocks, except at the tensor's end. Some ranks
    have none if there are fewer blocks than ranks.
    """
    blocks = -(-numel // BLOCK)
    begin = rank * blocks // size * BLOCK
    end = (rank + 1) * blocks // size * BLOCK
    return range(min(numel, begin), min(numel, end))


class Block(NamedTuple):
    """Slots [first, first + size): `size` is a power of two and divides `first`."""

    first: int
    size: int


class Turn(NamedTuple):
    """How the gradient of one slot changes a rank's stack of blocks."""

    level: int
    """The stack position that the gradient goes to."""
    fresh: bool
    """Whether that position is empty. If not, it holds the left neighbour, to which the gradient is
    added.
    """
    carries: int
    """How many times the top of the stack is then added to the block below it."""


@lru_cache(maxsize=256)
def turns(slots: range) -> tuple[Turn, ...]:
    """Return the turns of a rank that processes consecutive slots in order. Its stack works like a
    binary counter: two blocks are added as soon as they are neighbours.
    """
    return _walk(slots)[0]


@lru_cache(maxsize=256)
def blocks(slots: range) -> tuple[Block, ...]:
    """Return the blocks that a rank contributes, in the order of their slots: the largest aligned
    blocks that tile its range.
    """
    return _walk(slots)[1]


def _walk(slots: range) -> tuple[tuple[Turn, ...], tuple[Block, ...]]:
    steps: list[Turn] = []
    stack: list[Block] = []
    for slot in slots:
        stack.append(Block(slot, 1))
        merged = 0
        while len(stack) > 1 and _neighbours(stack[-2], stack[-1]):
            first, size = stack[-2]
            stack[-2:] = [Block(first, 2 * size)]
            merged += 1
        carries = max(0, merged - 1)
        steps.append(Turn(len(stack) - 1 + carries, merged == 0, carries))
    return tuple(steps), tuple(stack)


def _neighbours(left: Block, right: Block) -> bool:
    """Whether the two blocks are the halves of a larger block."""
    return (
        left.size == right.size
        and left.first + left.size == right.first
        and left.first % (2 * left.size) == 0
    )


def levels(slots: range) -> int:
    """Return the number of positions that a rank's stack needs."""
    return max((turn.level + 1 for turn in turns(slots)), default=0)


Term = int | tuple["Term", "Term"]
"""The index of a block in a list, or the sum of two terms."""


@lru_cache(maxsize=256)
def tree(blocks: tuple[Block, ...]) -> Term:
    """Return the order in which the blocks of all ranks are added. They tile slots 0 .. n - 1."""
    assert blocks, "a step has at least one micro-batch"
    in_order = sorted(blocks)
    ends = [block.first + block.size for block in in_order]
    end = ends[-1]
    assert [block.first for block in in_order] == [0, *ends[:-1]]
    indices = {block: index for index, block in enumerate(blocks)}
    size = 1
    while size < end:
        size *= 2
    root = _term(Block(0, size), indices, end)
    assert root is not None
    return root


def _term(block: Block, indices: dict[Block, int], end: int) -> Term | None:
    if block in indices:
        return indices[block]
    if block.first >= end:
        return None
    half = block.size // 2
    left = _term(Block(block.first, half), indices, end)
    right = _term(Block(block.first + half, half), indices, end)
    if left is None:
        return right
    if right is None:
        return left
    return left, right


@lru_cache(maxsize=256)
def tree_of(count: int) -> Term:
    """Return the order in which `count` tensors are added: ((0+1)+(2+3))+..."""
    return tree(tuple(Block(number, 1) for number in range(count)))


def add_up(term: Term, tensors: Sequence[Tensor], out: Tensor, op: str = "sum") -> None:
    """Write the sum (product, ...) of the tensors into `out`, which may be one of them. Each
    addition is rounded to their dtype.
    """
    if isinstance(term, int):
        if tensors[term].data_ptr() != out.data_ptr():
            out.copy_(tensors[term])
        return
    combine = COMBINE[op]
    left, right = term
    first = tensors[left] if isinstance(left, int) else _value(left, tensors, combine)
    second = tensors[right] if isinstance(right, int) else _value(right, tensors, combine)
    combine(first, second, out=out)


def _value(term: Term, tensors: Sequence[Tensor], combine: Callable[..., Tensor]) -> Tensor:
    if isinstance(term, int):
        return tensors[term]
    left, right = term
    return combine(_value(left, tensors, combine), _value(right, tensors, combine))


def fold(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Combine one tensor of each rank into `out`, in the same order on every rank. Half precision
    is added in float32.
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
    """Return the sum of a tensor's rows along the tree: shape [n, ...] gives [...], for n >= 1."""
    total = torch.empty_like(rows[0])
    add_up(tree_of(len(rows)), rows.unbind(), total)
    return total
