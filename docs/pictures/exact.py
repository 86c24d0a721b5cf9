"""Draws exact.svg: the order in which exact mode adds gradients, from the tree that a training uses:
which additions one rank makes alone, and which add the sums of several ranks.

    python docs/pictures/exact.py --out exact.svg
"""

from __future__ import annotations

import argparse
from typing import Any

from lockstep.collectives.addition_order import Block, blocks, tree
from lockstep.data.windows import Plan
from lockstep.tools.drawing import CARD, FAINT, INK, MARGIN, SERIES, SOFT, TINT, Drawing

MICRO_BATCHES, WORKERS = 8, 3
_LEAF, _LEVEL, _WRAP = 52, 54, 440  # px: between leaves, between levels, a line of text

Term = int | tuple["Term", "Term"]
"""A slot, or the sum of two terms."""


def leaves(term: Term) -> list[int]:
    """The slots of a tree, from left to right."""
    return [term] if isinstance(term, int) else [*leaves(term[0]), *leaves(term[1])]


def formula(term: Term) -> str:
    """Return the tree as text: `((0+1)+2)`."""
    return str(term) if isinstance(term, int) else f"({formula(term[0])}+{formula(term[1])})"


def drawing() -> Drawing:
    """Draw the micro-batches at the top, each in its rank's colour, and the additions below."""
    cut = Plan(samples=MICRO_BATCHES, global_batch=MICRO_BATCHES, micro_batch=1).cut(0)
    shares = [cut.share(rank, WORKERS) for rank in range(WORKERS)]
    order = tree(tuple(Block(slot, 1) for slot in range(MICRO_BATCHES)))
    lines = [
        f"exact mode: {MICRO_BATCHES} micro-batches on {WORKERS} ranks",
        f"the gradients are added as {formula(order)}",
        "the tree depends on the micro-batches only: any number of ranks gives the same bits",
    ]
    sheet = Drawing(lines[0], "\n".join([*lines, "", *described(shares)]))
    top = sheet.heading(lines, wrap=_WRAP) + 38
    for rank, own in enumerate(shares):
        middle = MARGIN + (own.start + own.stop) / 2 * _LEAF
        sheet.words(middle, top - 22, f"rank {rank}", anchor="middle", weight="bold")
    _draw(sheet, shares, order, top)
    meanings = {"added by one rank": (SERIES[0], TINT), "added between ranks": (CARD, 1.0)}
    low = sheet.legend(float(sheet.height + 4), meanings, _WRAP)
    note = "A box is a sum and the slots in it; a colour is the rank that computes it alone"
    sheet.note(low + 8, note, _WRAP)
    sheet.enlarge(640, most=1.4)
    return sheet


def described(shares: list[range]) -> list[str]:
    """Return one line per rank: its slots and the blocks of slots that it adds."""
    slots = [" ".join(map(str, own)) for own in shares]
    width = max(map(len, slots))
    lines = []
    for rank, own in enumerate(shares):
        sums = []
        for first, size in blocks(own):
            sums.append(f"[{' '.join(map(str, range(first, first + size)))}]")
        lines.append(f"rank {rank:<2} slots {slots[rank].ljust(width)}   brings {' '.join(sums)}")
    return lines


def _draw(sheet: Drawing, shares: list[range], term: Term, top: float) -> tuple[float, float]:
    """Draw a term with its parts; return the x of its box's middle and the y of its level."""
    slots = leaves(term)
    owners = [rank for rank, own in enumerate(shares) if set(slots) <= set(own)]
    box: dict[str, Any] = {"fill": CARD, "tint": 1.0, "stroke": INK}
    line = FAINT
    if owners:
        colour = SERIES[owners[0]]
        box = {"fill": colour, "tint": TINT, "stroke": colour}
        line = SOFT
    if isinstance(term, int):
        x = MARGIN + (term + 0.5) * _LEAF
        y = top
        words = f"{term}"
    else:
        left, right = (_draw(sheet, shares, part, top) for part in term)
        x = (left[0] + right[0]) / 2
        y = max(left[1], right[1]) + _LEVEL
        for from_x, from_y in (left, right):
            sheet.line([(from_x, from_y + 12), (x, y - 14)], line, 1.4)
        words = f"{slots[0]}-{slots[-1]}"
    sheet.box(x - 20, y - 14, 40, 26, rx=4, **box)
    sheet.words(x, y + 4, words, anchor="middle", size=12)
    return x, y


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    drawing().save(options.parse_args().out)
