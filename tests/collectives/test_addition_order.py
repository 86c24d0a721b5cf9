"""The tree over slots: whoever holds which of them, the same additions in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.addition_order import (
    ABSENT,
    Block,
    Term,
    add_rows,
    add_up,
    blocks,
    levels,
    tree,
    turns,
)
from lockstep.data.windows import Cut


def written(term: Term, names: list[str]) -> str:
    return (
        names[term]
        if isinstance(term, int)
        else f"({written(term[0], names)}+{written(term[1], names)})"
    )


def walked(slots: range) -> list[str]:
    """What lies on a rank's stack after its micro-batches, as written."""
    stack = ["" for _ in range(levels(slots))]
    for slot, turn in zip(slots, turns(slots), strict=True):
        stack[turn.level] = str(slot) if turn.fresh else f"({stack[turn.level]}+{slot})"
        for level in range(turn.level, turn.level - turn.carries, -1):
            stack[level - 1] = f"({stack[level - 1]}+{stack[level]})"
    return stack[: len(blocks(slots))]


def together(slots: int, filled: int, size: int) -> str:
    """The sum of a step with that many slots, of which the first hold samples, as written."""
    cut = Cut(step=0, epoch=0, start=0, stop=filled, micro_batch=1, slots=slots)
    shares = [cut.filled(rank, size) for rank in range(size)]
    every = tuple(block for share in shares for block in blocks(share))
    return written(tree(every), [text for share in shares for text in walked(share)])


def balanced(first: int, size: int, filled: int) -> str:
    if first >= filled:
        return ""
    if size == 1:
        return str(first)
    left, right = balanced(first, size // 2, filled), balanced(first + size // 2, size // 2, filled)
    return f"({left}+{right})" if right else left


def test_a_picture() -> None:
    assert [together(6, 6, size) for size in (1, 2, 6)] == ["(((0+1)+(2+3))+(4+5))"] * 3
    assert together(8, 5, 3) == "(((0+1)+(2+3))+4)"
    assert blocks(range(3, 6)) == (Block(3, 1), Block(4, 2))
    assert walked(range(3, 8)) == ["3", "((4+5)+(6+7))"]


@given(st.integers(1, 40), st.integers(1, 45), st.data())
def test_the_number_of_ranks_does_not_change_the_tree(
    slots: int, size: int, data: st.DataObject
) -> None:
    filled = data.draw(st.integers(1, slots))
    assert together(slots, filled, size) == balanced(0, 1 << (slots - 1).bit_length(), filled)


@given(st.integers(0, 70), st.integers(0, 70))
def test_a_rank_keeps_few_gradients(first: int, count: int) -> None:
    slots = range(first, first + count)
    assert levels(slots) <= 2 * max(1, count).bit_length()
    assert [block for block in blocks(slots)] == sorted(blocks(slots))
    assert sum(block.size for block in blocks(slots)) == count
    aligned = range(64, 64 + (1 << count % 7))
    assert len(blocks(aligned)) == 1
    assert levels(aligned) == max(1, count % 7)  # one of them is the sum itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_absent_changes_no_bit(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5, -3.25, float("inf"), float("-inf"), 1e-7], dtype=dtype)
    for found in (values + ABSENT, ABSENT + values):
        assert torch.equal(found, values)
        assert torch.equal(torch.signbit(found), torch.signbit(values))


def test_rows_are_added_along_the_tree() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    a = rows.unbind()
    assert torch.equal(add_rows(rows), ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + a[6]))
    assert torch.equal(add_rows(rows[:1]), rows[0])
    assert add_rows(torch.zeros(3, 0)).shape == (0,)


def test_the_sum_may_be_one_of_the_terms() -> None:
    a, b, c = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).unbind()
    expected = (a + b) + c
    out = a.clone()
    add_up(((0, 1), 2), [out, b, c], out)
    assert torch.equal(out, expected)
    add_up(0, [out], out)
    assert torch.equal(out, expected)
