"""`lockstep show data`: which positions each rank gets from the sampler that really runs, and
whether that is a fair split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lockstep.config.knob import whole
from lockstep.data.sampler import DistributedSampler, Split

_SHOWN = 24  # indices of a rank before the line is cut


def show(
    samples: int,
    workers: int,
    *,
    split: Split = "interleaved",
    drop_last: bool = False,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
) -> str:
    """A line a rank and three verdicts an epoch: equal counts, no overlap but the padding, union
    covers the data.

    Raises UsageError for numbers below 1 and for an unknown split.
    """
    for name, value in (("samples", samples), ("workers", workers), ("epochs", epochs)):
        whole(name, value)
    dataset: Any = range(samples)
    ranks = [
        DistributedSampler(dataset, workers, rank, shuffle, seed, drop_last, split)
        for rank in range(workers)
    ]
    title = f"{samples} sample{'s' * (samples > 1)}, {workers} rank{'s' * (workers > 1)}, {split}"
    title += ", drop last" if drop_last else ""
    title += f", shuffled with seed {seed}" if shuffle else ""
    return "\n\n".join([title, *(_epoch(ranks, epoch, epochs, samples) for epoch in range(epochs))])


def _epoch(ranks: Sequence[DistributedSampler], epoch: int, epochs: int, samples: int) -> str:
    parts = []
    for sampler in ranks:
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    width = len(str(len(ranks) - 1))
    lines = [f"epoch {epoch}"] if epochs > 1 else []
    lines += [f"  rank {rank:<{width}}  {_listed(part)}" for rank, part in enumerate(parts)]
    return "\n".join([*lines, *(f"  {verdict}" for verdict in verdicts(parts, samples))])


def verdicts(parts: Sequence[Sequence[int]], samples: int) -> list[str]:
    """Three sentences on a split of `samples` samples: equal counts, no overlap but the padding,
    union covers the data.
    """
    counts = sorted({len(part) for part in parts})
    seen = Counter(index for part in parts for index in part)
    padding = max(0, seen.total() - samples)
    extra = seen.total() - len(seen)
    repeated = sorted(index for index, count in seen.items() if count > 1)
    missing = sorted(set(range(samples)) - set(seen))
    equal = f"equal counts: {_yes(len(counts) == 1)}, {' or '.join(map(str, counts))} a rank"
    overlap = f"no overlap but the padding: {_yes(extra == padding)}"
    overlap += f", {extra} extra, of {_listed(repeated)}" if extra else ", nothing is repeated"
    union = f"union covers the data: {_yes(not missing)}"
    union += f", {len(missing)} left out: {_listed(missing)}" if missing else ""
    return [equal, overlap, union]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _listed(indices: Sequence[int]) -> str:
    shown = " ".join(map(str, indices[:_SHOWN]))
    return f"[{shown}]" if len(indices) <= _SHOWN else f"[{shown} ...] {len(indices)} in all"
