"""Show a data-parallel step: which samples each rank gets, and what it does with them. The samples
come from the batch plan that a training uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, INK, MARGIN, SERIES, SOFT, TINT, Drawing
from lockstep.tools.timing.output_files import counted, table

SHOWN = 8
"""The largest number of ranks that is drawn."""
_WIDE = 196  # px: the width of a column
_GAP = 18  # px: between columns
_HIGH = 44  # px: the height of a box
_DOWN = 26  # px: between boxes
_WRAP = 420  # px: the width of a line of text


@dataclass(frozen=True, slots=True)
class DataParallelStep:
    """The first step of an epoch."""

    plan: str
    """The batch plan in words."""
    batch: int
    slots: Sequence[range]
    """The micro-batches of each rank that hold samples."""
    samples: Sequence[range]
    """The samples of each rank."""

    @property
    def workers(self) -> int:
        return len(self.slots)


def title(step: DataParallelStep) -> str:
    """Describe in one line how the batch is divided."""
    return f"one step of {counted(step.workers, 'rank')}: {step.plan}"


def between(numbers: range) -> str:
    """Format a range: `0-15`, `7`, `none`."""
    if not numbers:
        return "none"
    if len(numbers) == 1:
        return f"{numbers[0]}"
    return f"{numbers[0]}-{numbers[-1]}"


def _rows(step: DataParallelStep) -> list[tuple[str, str]]:
    """Describe the samples and the micro-batches of each rank."""
    rows = []
    for samples, slots in zip(step.samples, step.slots, strict=True):
        noun = "sample" if len(samples) == 1 else "samples"
        described = f"{noun} {between(samples)}" if samples else "no samples"
        rows.append((described, f"micro-batch{'es' * (len(slots) > 1)} {between(slots)}"))
    return rows


def _phases(step: DataParallelStep) -> list[tuple[str, str]]:
    """Return the phases after a rank has its samples, with their explanations."""
    return [
        ("forward", "each rank: the losses of its own samples"),
        ("backward", "each rank: the gradients of its own samples"),
        ("all-reduce", f"all ranks together: add the gradients, divide by {step.batch} samples"),
        ("update", "each rank: the same optimizer step, so the weights stay equal"),
    ]


def text(step: DataParallelStep) -> str:
    """Return one line per rank and one line per phase."""
    rows = [(f"rank {rank}", *row) for rank, row in enumerate(_rows(step))]
    shares = table(["", "", ""], rows, left=range(3), gap=3)
    phases = table(["", ""], _phases(step), left=range(2), gap=3)
    return "\n".join([title(step), "", shares, "", phases])


def drawing(step: DataParallelStep) -> Drawing:
    """Draw one column per rank, from the samples at the top to the update at the bottom. Raises
    UsageError for more ranks than fit on a page.
    """
    if step.workers > SHOWN:
        raise UsageError("drawing-too-large", what=f"{step.workers} ranks", most=SHOWN)
    sheet = Drawing(title(step), text(step).replace("\n", ". "))
    width = step.workers * (_WIDE + _GAP) - _GAP
    wrap = max(_WRAP, width)
    first, _, rest = title(step).partition(": ")
    y = sheet.heading([first, rest], wrap=wrap) + 8
    batch = step.batch
    y = _shared(sheet, y, width, f"global batch: samples {between(range(batch))}")
    y = _row(sheet, step, y, _rows(step), named=True)
    y = _row(sheet, step, y, [("forward", "loss of these samples")] * step.workers)
    y = _row(sheet, step, y, [("backward", "gradient of these samples")] * step.workers)
    _down(sheet, step, y)
    words = f"all-reduce: sum of all gradients / {batch} samples"
    y = _shared(sheet, y + _DOWN, width, words)
    y = _row(sheet, step, y, [("update", "same gradient, same weights")] * step.workers)
    note = "A rank with more micro-batches does forward and backward once for each, and adds up"
    sheet.note(y + 24, note, wrap)
    sheet.enlarge(680, most=1.5)
    return sheet


def _shared(sheet: Drawing, y: float, width: float, words: str) -> float:
    """Draw a box over all ranks and return the y below it."""
    sheet.box(MARGIN, y, width, 32, CARD, stroke=INK, rx=5)
    sheet.words(MARGIN + width / 2, y + 21, words, anchor="middle", weight="bold")
    return y + 32


def _row(
    sheet: Drawing,
    step: DataParallelStep,
    y: float,
    boxes: list[tuple[str, str]],
    *,
    named: bool = False,
) -> float:
    """Draw an arrow down from `y` and a box below it for each rank. Return the y below."""
    _down(sheet, step, y)
    top = y + _DOWN
    height = _HIGH + 18 * named
    for rank, box in enumerate(boxes):
        x = MARGIN + rank * (_WIDE + _GAP)
        colour = SERIES[rank % len(SERIES)]
        sheet.box(x, top, _WIDE, height, colour, tint=TINT, stroke=colour, rx=5)
        lines = [f"rank {rank}", *box] if named else box
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            base = top + 18 + 18 * number
            sheet.words(x + _WIDE / 2, base, line, anchor="middle", size=12, weight=weight)
    return top + height


def _down(sheet: Drawing, step: DataParallelStep, y: float) -> None:
    for rank in range(step.workers):
        x = MARGIN + rank * (_WIDE + _GAP) + _WIDE / 2
        curve = (x, y + 2), (x, y + 8), (x, y + 14), (x, y + _DOWN - 2)
        sheet.arrow(curve, "flow", SOFT)
