"""Draws step.svg: one data-parallel step, from the samples of each rank to the update. The batch plan
that a training uses divides the samples.

    python docs/pictures/step.py --out step.svg
"""

from __future__ import annotations

import argparse

from lockstep.data.windows import Plan
from lockstep.tools.drawing import CARD, INK, MARGIN, SERIES, SOFT, TINT, Drawing
from lockstep.tools.timing.output_files import table

WORKERS, BATCH = 2, 32
_WIDE = 196  # px: the width of a column
_GAP = 18  # px: between columns
_HIGH = 44  # px: the height of a box
_DOWN = 26  # px: between boxes
_WIDTH = WORKERS * (_WIDE + _GAP) - _GAP
_PHASES = [
    ("forward", "each rank: the losses of its own samples"),
    ("backward", "each rank: the gradients of its own samples"),
    ("all-reduce", f"all ranks together: add the gradients, divide by {BATCH} samples"),
    ("update", "each rank: the same optimizer step, so the weights stay equal"),
]


def drawing() -> Drawing:
    """Draw one column per rank, from the samples at the top to the update at the bottom."""
    plan = Plan(samples=BATCH, global_batch=BATCH, micro_batch=BATCH // WORKERS)
    cut = plan.cut(0)
    shares = []
    for rank in range(WORKERS):
        [slot] = cut.filled(rank, WORKERS)
        samples = cut.positions(slot)
        shares.append((f"samples {samples[0]}-{samples[-1]}", f"micro-batch {slot}"))
    rows = [(f"rank {rank}", *share) for rank, share in enumerate(shares)]
    first, rest = f"one step of {WORKERS} ranks", plan.describe(WORKERS)
    title = f"{first}: {rest}"
    described = [
        title,
        "",
        table(["", "", ""], rows, left=range(3), gap=3),
        "",
        table(["", ""], _PHASES, left=range(2), gap=3),
    ]
    sheet = Drawing(title, "\n".join(described).replace("\n", ". "))
    y = sheet.heading([first, rest], wrap=420) + 8
    y = _shared(sheet, y, f"global batch: samples 0-{BATCH - 1}")
    y = _row(sheet, y, rows)
    y = _row(sheet, y, [("forward", "loss of these samples")] * WORKERS)
    y = _row(sheet, y, [("backward", "gradient of these samples")] * WORKERS)
    _down(sheet, y)
    y = _shared(sheet, y + _DOWN, f"all-reduce: sum of all gradients / {BATCH} samples")
    y = _row(sheet, y, [("update", "same gradient, same weights")] * WORKERS)
    note = "A rank with more micro-batches does forward and backward once for each, and adds up"
    sheet.note(y + 24, note, wrap=420)
    sheet.enlarge(680, most=1.5)
    return sheet


def _shared(sheet: Drawing, y: float, words: str) -> float:
    """Draw a box over all ranks and return the y below it."""
    sheet.box(MARGIN, y, _WIDTH, 32, CARD, stroke=INK, rx=5)
    sheet.words(MARGIN + _WIDTH / 2, y + 21, words, anchor="middle", weight="bold")
    return y + 32


def _row(sheet: Drawing, y: float, boxes: list[tuple[str, ...]]) -> float:
    """Draw an arrow down from `y` and a box below it for each rank. Return the y below."""
    _down(sheet, y)
    top = y + _DOWN
    height = _HIGH + 18 * (len(boxes[0]) - 2)
    for rank, lines in enumerate(boxes):
        x = MARGIN + rank * (_WIDE + _GAP)
        colour = SERIES[rank]
        sheet.box(x, top, _WIDE, height, colour, tint=TINT, stroke=colour, rx=5)
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            base = top + 18 + 18 * number
            sheet.words(x + _WIDE / 2, base, line, anchor="middle", size=12, weight=weight)
    return top + height


def _down(sheet: Drawing, y: float) -> None:
    for rank in range(WORKERS):
        x = MARGIN + rank * (_WIDE + _GAP) + _WIDE / 2
        sheet.arrow(((x, y + 2), (x, y + 8), (x, y + 14), (x, y + _DOWN - 2)), "flow", SOFT)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    drawing().save(options.parse_args().out)
