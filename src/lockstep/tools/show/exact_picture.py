"""Draw exact mode's order of addition, from the tree that a training uses: which additions one rank
makes alone, and which add the sums of several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.collectives.addition_order import Block, Term, blocks, tree
from lockstep.config.knob import whole
from lockstep.data.windows import Plan, counted
from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, FAINT, INK, MARGIN, SERIES, SOFT, TINT, Drawing

SHOWN = 32
"""The largest number of micro-batches that is drawn."""
_LEAF, _LEVEL, _WRAP = 52, 54, 440  # px: between leaves, between levels, a line of text


@dataclass(frozen=True, slots=True)
class ExactStep:
    """A step with its number of micro-batches and the slots of each rank."""

    micro_batches: int
    slots: tuple[range, ...]

    @classmethod
    def of(cls, micro_batches: int, workers: int) -> ExactStep:
        """Divide the micro-batches among ranks as a training does. Raises UsageError for numbers
        below 1.
        """
        whole("micro_batches", micro_batches)
        whole("workers", workers)
        plan = Plan(samples=micro_batches, global_batch=micro_batches, micro_batch=1)
        cut = plan.cut(0)
        return cls(micro_batches, tuple(cut.share(rank, workers) for rank in range(workers)))

    @property
    def tree(self) -> Term:
        """The order of addition, as a tree over slots."""
        return tree(tuple(Block(slot, 1) for slot in range(self.micro_batches)))

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
    for rank, own in enumerate(step.slots):
        sums = " ".join(map(_block, blocks(own))) or "nothing"
        listed = slots[rank].ljust(width)
        lines.append(f"rank {rank:<2} slots {listed}   brings {sums}")
    return "\n".join(lines)


def _block(block: Block) -> str:
    slots = range(block.first, block.first + block.size)
    return f"[{' '.join(map(str, slots))}]"


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
