"""The picture of exact mode is of the order in which gradients are really added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.show import exact_step
from lockstep.collectives.addition_order import Block, blocks, tree
from lockstep.tools.show.exact_picture import Term, drawing, leaves, text
from tests.refused import refused

EIGHT_ON_THREE = """\
exact mode: 8 micro-batches on 3 ranks
the gradients are added as (((0+1)+(2+3))+((4+5)+(6+7)))
the tree depends on the micro-batches only: any number of ranks gives the same bits

rank 0  slots 0 1 2   brings [0 1] [2]
rank 1  slots 3 4 5   brings [3] [4 5]
rank 2  slots 6 7     brings [6 7]"""


def test_eight_on_three() -> None:
    assert text(exact_step(8, 3)) == EIGHT_ON_THREE


def whole(term: Term, every: tuple[Block, ...]) -> Term:
    """A tree over the blocks that ranks bring, each block written out as a tree of its slots."""
    if not isinstance(term, int):
        return whole(term[0], every), whole(term[1], every)
    first, size = every[term]
    if size == 1:
        return first
    halves = (Block(first, size // 2), Block(first + size // 2, size // 2))
    return whole(0, halves[:1]), whole(0, halves[1:])


@given(st.integers(1, 33), st.integers(1, 9))
def test_what_ranks_bring_adds_up_along_the_tree_that_is_drawn(count: int, workers: int) -> None:
    step = exact_step(count, workers)
    brought = tuple(block for mine in step.slots for block in blocks(mine))
    assert whole(tree(brought), brought) == step.tree
    assert leaves(step.tree) == list(range(count))


def test_what_cannot_be() -> None:
    with refused("wrong-value", name="micro_batches", value=0):
        exact_step(0, 1)
    with refused("drawing-too-large", what="33 micro-batches", most=32):
        drawing(exact_step(33, 1))
