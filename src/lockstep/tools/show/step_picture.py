"""Show a data-parallel step: which samples each rank gets, and what it does with them. The samples
come from the batch plan that a training uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.knob import whole
from lockstep.data.windows import Cut, Plan, counted
from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, INK, MARGIN, SERIES, SOFT, TINT, Drawing
from lockstep.tools.timing.output_files import table

BATCH = 32
"""The default number of samples in a step."""
SHOWN = 8
"""The largest number of ranks that is drawn."""
_WIDE = 196  # px: the width of a column
_GAP = 18  # px: between columns
_HIGH = 44  # px: the height of a box
_DOWN = 26  # px: between boxes
_WRAP = 420  # px: the width of a line of text


@dataclass(frozen=True, slots=True)
class DataParallelStep:
    """The first step of an epoch, on `workers` ranks."""

    plan: Plan
    workers: int

    @classmethod
    def of(cls, workers: int, batch: int, micro_batch: int | None) -> DataParallelStep:
        """Plan a step of `batch` samples. `micro_batch` is None for one micro-batch per rank.
        Raises UsageError for sizes that cannot be divided.
        """
        whole("workers", workers)
        whole("batch", batch)
        size = -(-batch // workers) if micro_batch is None else micro_batch
        return cls(Plan(samples=batch, global_batch=batch, micro_batch=size), workers)

    @property
    def cut(self) -> Cut:
        return self.plan.cut(0)

    def slots(self, rank: int) -> range:
        """The micro-batches of one rank that hold samples."""
        return self.cut.filled(rank, self.workers)

    def samples(self, rank: int) -> range:
        """The samples of one rank, a range because its micro-batches are consecutive."""
        slots = self.slots(rank)
        if not slots:
            return range(0)
        first = self.cut.positions(slots[0])
        last = self.cut.positions(slots[-1])
        return range(first.start, last.stop)


def title(step: DataParallelStep) -> str:
    """Describe in one line how the batch is divided."""
    return f"one step of {counted(step.workers, 'rank')}: {step.plan.describe(step.workers)}"


def between(numbers: range) -> str:
    """Format a range: `0-15`, `7`, `none`."""
    if not numbers:
        return "none"
    if len(numbers) == 1:
        return f"{numbers[0]}"
    return f"{numbers[0]}-{numbers[-1]}"


def _samples(step: DataParallelStep, rank: int) -> str:
    """Describe a rank's samples."""
    samples = step.samples(rank)
    if not samples:
        return "no samples"
    noun = "sample" if len(samples) == 1 else "samples"
    return f"{noun} {between(samples)}"


def _slots(step: DataParallelStep, rank: int) -> str:
    """Describe a rank's micro-batches by their slots."""
    slots = step.slots(rank)
    noun = "micro-batches" if len(slots) > 1 else "micro-batch"
    return f"{noun} {between(slots)}"


def _phases(step: DataParallelStep) -> list[tuple[str, str]]:
    """Return the phases after a rank has its samples, with their explanations."""
    weight = step.plan.global_batch
    return [
        ("forward", "each rank: the losses of its own samples"),
        ("backward", "each rank: the gradients of its own samples"),
        ("all-reduce", f"all ranks together: add the gradients, divide by {weight} samples"),
        ("update", "each rank: the same optimizer step, so the weights stay equal"),
    ]


def text(step: DataParallelStep) -> str:
    """Return one line per rank and one line per phase."""
    ranks = range(step.workers)
    rows = [(f"rank {rank}", _samples(step, rank), _slots(step, rank)) for rank in ranks]
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
    batch = step.plan.global_batch
    y = _shared(sheet, y, width, f"global batch: samples {between(range(batch))}")
    shares = [(_samples(step, rank), _slots(step, rank)) for rank in range(step.workers)]
    y = _row(sheet, step, y, shares, named=True)
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
