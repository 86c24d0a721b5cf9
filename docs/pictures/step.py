"""Draws step.svg: one data-parallel step, from the samples of each rank to the update. The batch plan
that a training uses divides the samples. And micro_batches.svg: a batch in parts, on one process.

    python docs/pictures/step.py --out step.svg
    python docs/pictures/step.py --micro-batches --out micro_batches.svg
"""

from __future__ import annotations

import argparse

from lockstep.data.windows import Plan
from lockstep.tools.drawing import CARD, INK, MARGIN, SERIES, SOFT, TINT, Drawing
from lockstep.tools.timing.output_files import table

WORKERS, BATCH = 2, 32
_GAP = 18  # px: between columns
_HIGH = 44  # px: the height of a box
_DOWN = 26  # px: between boxes
_WIDTH = 410  # px: of all columns
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
    _down(sheet, y, WORKERS)
    y = _shared(sheet, y + _DOWN, f"all-reduce: sum of all gradients / {BATCH} samples")
    y = _row(sheet, y, [("update", "same gradient, same weights")] * WORKERS)
    note = "A rank with more micro-batches does forward and backward once for each, and adds up"
    sheet.note(y + 24, note, wrap=420)
    sheet.enlarge(680, most=1.5)
    return sheet


def micro_batches() -> Drawing:
    """Draw one column per micro-batch of a batch of 10 samples, from the samples to the update."""
    title = "one batch in micro-batches of 4, 4 and 2 samples"
    divided = "add the sums, divide once by 4 + 4 + 2"
    sheet = Drawing(
        title, f"Each: forward, backward, a sum of gradients and a weight. Then {divided}."
    )
    y = sheet.heading([title], wrap=420) + 8
    y = _shared(sheet, y, "samples 0-9")
    shares = [("micro-batch 0", "samples 0-3"), ("micro-batch 1", "samples 4-7")]
    y = _row(sheet, y, [*shares, ("micro-batch 2", "samples 8-9")])
    y = _row(sheet, y, [("forward", "backward")] * 3)
    y = _row(sheet, y, [("sum of gradients", f"weight {weight}") for weight in (4, 4, 2)])
    _down(sheet, y, 3)
    y = _shared(sheet, y + _DOWN, divided)
    _down(sheet, y, 1)
    _shared(sheet, y + _DOWN, "update")
    sheet.enlarge(680, most=1.5)
    return sheet


def _shared(sheet: Drawing, y: float, words: str) -> float:
    """Draw a box over all columns and return the y below it."""
    sheet.box(MARGIN, y, _WIDTH, 32, CARD, stroke=INK, rx=5)
    sheet.words(MARGIN + _WIDTH / 2, y + 21, words, anchor="middle", weight="bold")
    return y + 32


def _row(sheet: Drawing, y: float, boxes: list[tuple[str, ...]]) -> float:
    """Draw an arrow down from `y` and a box below it for each column. Return the y below."""
    _down(sheet, y, len(boxes))
    top = y + _DOWN
    height = _HIGH + 18 * (len(boxes[0]) - 2)
    wide = (_WIDTH + _GAP) / len(boxes) - _GAP
    for column, lines in enumerate(boxes):
        x = MARGIN + column * (wide + _GAP)
        colour = SERIES[column]
        sheet.box(x, top, wide, height, colour, tint=TINT, stroke=colour, rx=5)
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            base = top + 18 + 18 * number
            sheet.words(x + wide / 2, base, line, anchor="middle", size=12, weight=weight)
    return top + height


def _down(sheet: Drawing, y: float, columns: int) -> None:
    for column in range(columns):
        x = MARGIN - _GAP / 2 + (column + 0.5) * (_WIDTH + _GAP) / columns
        sheet.arrow(((x, y + 2), (x, y + 8), (x, y + 14), (x, y + _DOWN - 2)), "flow", SOFT)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--micro-batches", action="store_true", help="one rank's batch instead")
    options.add_argument("--out", required=True)
    chosen = options.parse_args()
    (micro_batches() if chosen.micro_batches else drawing()).save(chosen.out)
