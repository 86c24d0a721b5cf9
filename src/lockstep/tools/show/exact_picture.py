"""Draw exact mode's order of addition, from the tree that a training uses: which additions one rank
makes alone, and which add the sums of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, FAINT, INK, MARGIN, SERIES, SOFT, TINT, Drawing
from lockstep.tools.timing.output_files import counted

SHOWN = 32
"""The largest number of micro-batches that is drawn."""
_LEAF, _LEVEL, _WRAP = 52, 54, 440  # px: between leaves, between levels, a line of text


Term = int | tuple["Term", "Term"]
"""A slot, or the sum of two terms."""


@dataclass(frozen=True, slots=True)
class ExactStep:
    """A step in exact mode."""

    slots: Sequence[range]
    """The micro-batches of each rank."""
    blocks: Sequence[Sequence[range]]
    """The blocks of micro-batches that each rank adds."""
    tree: Term
    """The order of addition, as a tree over all micro-batches."""

    @property
    def micro_batches(self) -> int:
        return sum(map(len, self.slots))

    def owner(self, term: Term) -> int | None:
        """The rank that adds this term alone; None if its parts are on several ranks."""
        for rank, slots in enumerate(self.slots):
            if set(leaves(term)) <= set(slots):
                return rank
        return None


def leaves(term: Term) -> list[int]:
    """The slots of a tree, from left to right."""
    if isinstance(term, int):
        return [term]
    left, right = term
    return [*leaves(left), *leaves(right)]


def formula(term: Term) -> str:
    """Return the tree as text: `((0+1)+2)`."""
    if isinstance(term, int):
        return str(term)
    left, right = term
    return f"({formula(left)}+{formula(right)})"


def title(step: ExactStep) -> list[str]:
    """Describe the step as a whole, in lines."""
    count = counted(step.micro_batches, "micro-batch", "es")
    return [
        f"exact mode: {count} on {counted(len(step.slots), 'rank')}",
        f"the gradients are added as {formula(step.tree)}",
        "the tree depends on the micro-batches only: any number of ranks gives the same bits",
    ]


def text(step: ExactStep) -> str:
    """Return the title and one line per rank: its slots and the blocks of slots that it adds."""
    slots = [" ".join(map(str, own)) for own in step.slots]
    width = max(map(len, slots))
    lines = [*title(step), ""]
    for rank, blocks in enumerate(step.blocks):
        sums = " ".join(map(_block, blocks)) or "nothing"
        listed = slots[rank].ljust(width)
        lines.append(f"rank {rank:<2} slots {listed}   brings {sums}")
    return "\n".join(lines)


def _block(block: range) -> str:
    return f"[{' '.join(map(str, block))}]"


def drawing(step: ExactStep) -> Drawing:
    """Draw the micro-batches at the top, each in its rank's colour, and the additions below them.
    Raises UsageError for more micro-batches than fit on a page.
    """
    count = step.micro_batches
    if count > SHOWN:
        raise UsageError("drawing-too-large", what=f"{count} micro-batches", most=SHOWN)
    lines = title(step)
    sheet = Drawing(lines[0], text(step))
    wrap = max(_WRAP, MARGIN + count * _LEAF)
    top = sheet.heading(lines, wrap=wrap) + 38
    for rank, own in enumerate(step.slots):
        if own:
            middle = MARGIN + (own.start + own.stop) / 2 * _LEAF
            sheet.words(middle, top - 22, f"rank {rank}", anchor="middle", weight="bold")
    _draw(sheet, step, step.tree, top)
    meanings = {"added by one rank": (SERIES[0], TINT), "added between ranks": (CARD, 1.0)}
    low = sheet.legend(float(sheet.height + 4), meanings, wrap)
    note = "A box is a sum and the slots in it; a colour is the rank that computes it alone"
    sheet.note(low + 8, note, wrap)
    sheet.enlarge(640, most=1.4)
    return sheet


def _draw(sheet: Drawing, step: ExactStep, term: Term, top: float) -> tuple[float, float]:
    """Draw a term with its parts; return the x of its box's middle and the y of its level."""
    rank = step.owner(term)
    box: dict[str, Any] = {"fill": CARD, "tint": 1.0, "stroke": INK}
    line = FAINT
    if rank is not None:
        colour = SERIES[rank % len(SERIES)]
        box = {"fill": colour, "tint": TINT, "stroke": colour}
        line = SOFT
    if isinstance(term, int):
        x = MARGIN + (term + 0.5) * _LEAF
        y = top
        slots = f"{term}"
    else:
        left, right = (_draw(sheet, step, part, top) for part in term)
        x = (left[0] + right[0]) / 2
        y = max(left[1], right[1]) + _LEVEL
        for from_x, from_y in (left, right):
            sheet.line([(from_x, from_y + 12), (x, y - 14)], line, 1.4)
        first, *_, last = leaves(term)
        slots = f"{first}-{last}"
    sheet.box(x - 20, y - 14, 40, 26, rx=4, **box)
    sheet.words(x, y + 4, slots, anchor="middle", size=12)
    return x, y
