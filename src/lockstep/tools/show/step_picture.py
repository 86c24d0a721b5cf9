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
_WIDE, _GAP, _HIGH, _DOWN = 196, 18, 44, 26  # px: width and gap of columns, height and gap of boxes
_WRAP = 420


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
        each = -(-batch // workers) if micro_batch is None else micro_batch
        return cls(Plan(samples=batch, global_batch=batch, micro_batch=each), workers)

    @property
    def cut(self) -> Cut:
        return self.plan.cut(0)

    def slots(self, rank: int) -> range:
        """The micro-batches of one rank that hold samples."""
        return self.cut.filled(rank, self.workers)

    def samples(self, rank: int) -> range:
        """The samples of one rank, a range because its micro-batches are consecutive."""
        parts = [self.cut.positions(slot) for slot in self.slots(rank)]
        return range(parts[0].start, parts[-1].stop) if parts else range(0)


def title(step: DataParallelStep) -> str:
    """Describe in one line how the batch is divided."""
    return f"one step of {counted(step.workers, 'rank')}: {step.plan.describe(step.workers)}"


def between(numbers: range) -> str:
    """Format a range: `0-15`, `7`, `none`."""
    if not numbers:
        return "none"
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def held(step: DataParallelStep, rank: int) -> str:
    """Describe a rank's samples."""
    if not (samples := step.samples(rank)):
        return "no samples"
    return f"{'samples' if len(samples) > 1 else 'sample'} {between(samples)}"


def turns(step: DataParallelStep, rank: int) -> str:
    """Describe a rank's micro-batches by their slots."""
    slots = step.slots(rank)
    return f"{'micro-batches' if len(slots) > 1 else 'micro-batch'} {between(slots)}"


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
    rows = [(f"rank {rank}", held(step, rank), turns(step, rank)) for rank in range(step.workers)]
    phases = table(["", ""], _phases(step), left=range(2), gap=3)
    return "\n".join([title(step), "", table(["", "", ""], rows, left=range(3), gap=3), "", phases])


def drawing(step: DataParallelStep) -> Drawing:
    """Draw one column per rank, from the samples at the top to the update at the bottom. Raises
    UsageError for more ranks than fit on a page.
    """
    if step.workers > SHOWN:
        raise UsageError("drawing-too-large", what=f"{step.workers} ranks", most=SHOWN)
    sheet = Drawing(title(step), text(step).replace("\n", ". "))
    whole_width = step.workers * (_WIDE + _GAP) - _GAP
    wrap = max(_WRAP, whole_width)
    first, *_ = said = title(step).partition(": ")
    y = sheet.heading([first, said[2]], wrap=wrap) + 8
    y = _shared(
        sheet, y, whole_width, f"global batch: samples {between(range(step.plan.global_batch))}"
    )
    rows = [
        [(held(step, rank), turns(step, rank)) for rank in range(step.workers)],
        [("forward", "loss of these samples")] * step.workers,
        [("backward", "gradient of these samples")] * step.workers,
    ]
    for number, row in enumerate(rows):
        _down(sheet, step, y)
        y = _row(sheet, step, y + _DOWN, row, named=number == 0)
    _down(sheet, step, y)
    words = f"all-reduce: sum of all gradients / {step.plan.global_batch} samples"
    y = _shared(sheet, y + _DOWN, whole_width, words)
    _down(sheet, step, y)
    y = _row(sheet, step, y + _DOWN, [("update", "same gradient, same weights")] * step.workers)
    note = "A rank with more micro-batches does forward and backward once for each, and adds up"
    sheet.note(y + 24, note, wrap)
    sheet.zoom = max(1.0, min(1.5, 680 / sheet.width))
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
    """Draw one box per rank and return the y below them."""
    high = _HIGH + 18 * named
    for rank, (first, second) in enumerate(boxes):
        x, colour = MARGIN + rank * (_WIDE + _GAP), SERIES[rank % len(SERIES)]
        sheet.box(x, y, _WIDE, high, colour, tint=TINT, stroke=colour, rx=5)
        lines = [f"rank {rank}", first, second] if named else [first, second]
        for number, line in enumerate(lines):
            bold = "bold" if number == 0 else "normal"
            base = y + 18 + 18 * number
            sheet.words(x + _WIDE / 2, base, line, anchor="middle", size=12, weight=bold)
    return y + high


def _down(sheet: Drawing, step: DataParallelStep, y: float) -> None:
    for rank in range(step.workers):
        x = MARGIN + rank * (_WIDE + _GAP) + _WIDE / 2
        sheet.arrow(((x, y + 2), (x, y + 8), (x, y + 14), (x, y + _DOWN - 2)), "flow", SOFT)
