"""`lockstep show data`: which samples each rank gets from Lockstep's DistributedSampler, and
whether the split is fair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from lockstep import DistributedSampler
from lockstep.errors import UsageError
from lockstep.tools.drawing import CARD, MARGIN, SERIES, SOFT, TINT, Drawing, wrapped
from lockstep.tools.timing.output_files import counted

_SHOWN = 24  # indices of a rank before the line is cut
_DRAWN = 128
"""The largest number of samples that is drawn."""
_SQUARE, _LEFT, _ROW, _WRAP = 26, 74, 13, 420  # px, except _ROW: samples in a line
Parts = Sequence[Sequence[int]]
"""The samples of each rank."""


@dataclass(frozen=True, slots=True)
class Deal:
    """The samples that each rank gets, by epoch."""

    title: str
    samples: int
    epochs: Sequence[Parts]

    def names(self) -> list[str]:
        """The names of the epochs; a single epoch has an empty name."""
        if len(self.epochs) == 1:
            return [""]
        return [f"epoch {epoch}" for epoch in range(len(self.epochs))]


def deal(
    samples: int,
    workers: int,
    *,
    split: Literal["interleaved", "blocks"] = "interleaved",
    drop_last: bool = False,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
) -> Deal:
    """Return the samples that the sampler gives to each rank. Raises UsageError for an
    unknown split.
    """
    dataset: Any = range(samples)
    samplers = [
        DistributedSampler(dataset, workers, rank, shuffle, seed, drop_last, split)
        for rank in range(workers)
    ]
    parts_by_epoch = []
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts_by_epoch.append([list(sampler) for sampler in samplers])
    title = f"{counted(samples, 'sample')}, {counted(workers, 'rank')}, {split}"
    if drop_last:
        title += ", drop last"
    if shuffle:
        title += f", shuffled with seed {seed}"
    return Deal(title, samples, parts_by_epoch)


def title(deal: Deal) -> str:
    return deal.title


def text(deal: Deal) -> str:
    """Return one line per rank and, for each epoch, the three sentences of `verdicts`."""
    blocks = [deal.title]
    for name, parts in zip(deal.names(), deal.epochs, strict=True):
        width = len(str(len(parts) - 1))
        lines = [f"  rank {rank:<{width}}  {_listed(part)}" for rank, part in enumerate(parts)]
        lines += [f"  {verdict}" for verdict in verdicts(parts, deal.samples)]
        if name:
            lines.insert(0, name)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def verdicts(parts: Parts, samples: int) -> list[str]:
    """Return three sentences about a split of `samples` samples: whether the counts are equal,
    whether only the padding overlaps, and whether the union covers the data.
    """
    sizes = sorted({len(part) for part in parts})
    seen = Counter(chain(*parts))
    padding = max(0, seen.total() - samples)
    extra = seen.total() - len(seen)
    equal = f"equal counts: {_yes(len(sizes) == 1)}, {' or '.join(map(str, sizes))} a rank"
    overlap = f"no overlap but the padding: {_yes(extra == padding)}"
    if extra:
        repeated = sorted(index for index, count in seen.items() if count > 1)
        overlap += f", {extra} extra, of {_listed(repeated)}"
    else:
        overlap += ", nothing is repeated"
    missing = [index for index in range(samples) if index not in seen]
    union = f"union covers the data: {_yes(not missing)}"
    if missing:
        union += f", {len(missing)} left out: {_listed(missing)}"
    return [equal, overlap, union]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _listed(indices: Sequence[int]) -> str:
    shown = " ".join(map(str, indices[:_SHOWN]))
    if len(indices) > _SHOWN:
        return f"[{shown} ...] {len(indices)} in all"
    return f"[{shown}]"


def drawing(deal: Deal) -> Drawing:
    """Draw the dataset, each sample in the colour of its rank, and below it each rank's samples.
    Raises UsageError for more samples than fit on a page.
    """
    if deal.samples > _DRAWN or max(map(len, deal.epochs[0])) > _DRAWN:
        raise UsageError("drawing-too-large", what=f"{deal.samples} samples", most=_DRAWN)
    sheet = Drawing(deal.title, text(deal).replace("\n", ". "))
    y = sheet.heading([deal.title], wrap=_WRAP) + 6
    for name, parts in zip(deal.names(), deal.epochs, strict=True):
        if name:
            sheet.words(MARGIN, y + 12, name, weight="bold")
            y += 24
        first_rank: dict[int, int | None] = dict.fromkeys(range(deal.samples))
        for rank, part in reversed([*enumerate(parts)]):
            first_rank |= dict.fromkeys(part, rank)
        y = _squares(sheet, y, "dataset", list(first_rank.items()))
        seen: Counter[int] = Counter()
        for rank, part in enumerate(parts):
            y = _squares(sheet, y + 10, f"rank {rank}", [(index, rank) for index in part], seen)
        for verdict in verdicts(parts, deal.samples):
            for line in wrapped(verdict, _WRAP, 12):
                y += 18
                sheet.words(MARGIN, y, line, size=12)
        y += 22
    sheet.words(MARGIN, y, "Dashed edge: a sample that another rank has too", size=12, fill=SOFT)
    sheet.enlarge(680, most=1.5)
    return sheet


def _squares(
    sheet: Drawing,
    y: float,
    name: str,
    samples: Sequence[tuple[int, int | None]],
    seen: Counter[int] | None = None,
) -> float:
    """Draw one square per sample, in lines, and return the y below them. A sample of rank None is
    on no rank. A sample that `seen` already counts gets a dashed edge.
    """
    sheet.words(MARGIN, y + 18, name, weight="bold")
    pitch = _SQUARE + 3
    for number, (index, rank) in enumerate(samples):
        line, column = divmod(number, _ROW)
        x = _LEFT + column * pitch
        top = y + line * pitch
        colour = CARD
        edge = SOFT
        tint = 1.0
        if rank is not None:
            colour = edge = SERIES[rank % len(SERIES)]
            tint = TINT
        more: dict[str, Any] = {"rx": 3, "stroke": edge}
        if seen is not None:
            if seen[index]:
                more["stroke-dasharray"] = "4 2"
            seen[index] += 1
        sheet.box(x, top, _SQUARE, _SQUARE, colour, tint=tint, **more)
        sheet.words(x + _SQUARE / 2, top + 17, str(index), anchor="middle", size=11)
    lines = -(-max(1, len(samples)) // _ROW)
    return y + pitch * lines
