"""`lockstep show data`: which positions each rank gets from the sampler that really runs, and whether that is a fair split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.data.sampler import DistributedSampler, Split
from lockstep.errors import UsageError

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
    """A line a rank and three verdicts an epoch: equal counts, no overlap but the padding, union covers the data.

    Raises UsageError for numbers below 1.
    """
    for name, value in (("samples", samples), ("workers", workers), ("epochs", epochs)):
        if value < 1:
            raise UsageError(f"{name}={value}: give at least 1")
    ranks = [DistributedSampler(range(samples), workers, rank, shuffle, seed, drop_last, split) for rank in range(workers)]  # type: ignore[arg-type]
    lines = [
        f"{samples} samples, {workers} ranks, {split}{', drop last' if drop_last else ''}{f', shuffled by seed {seed}' if shuffle else ''}"
    ]
    for epoch in range(epochs):
        parts = []
        for sampler in ranks:
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
        lines.append("" if epochs == 1 else f"\nepoch {epoch}")
        lines += [f"  rank {rank:<3} {_line(part)}" for rank, part in enumerate(parts)]
        lines += ["", *_verdicts(parts, samples)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _line(part: Sequence[int]) -> str:
    shown = " ".join(map(str, part[:_SHOWN]))
    return f"[{shown}]" if len(part) <= _SHOWN else f"[{shown} ...] {len(part)} in all"


def _verdicts(parts: Sequence[Sequence[int]], samples: int) -> list[str]:
    counts = {len(part) for part in parts}
    seen = Counter(index for part in parts for index in part)
    total = sum(seen.values())
    twice = total - len(seen)
    padding = max(0, total - samples)
    missing = sorted(set(range(samples)) - set(seen))
    equal = f"equal counts: {'yes' if len(counts) == 1 else 'NO'}, {', '.join(map(str, sorted(counts)))} a rank"
    overlap = "no overlap: yes"
    if twice:
        repeated = sorted(index for index, count in seen.items() if count > 1)
        overlap = f"no overlap but the padding: {'yes' if twice == padding else 'NO'}, {twice} repeated {_line(repeated)}"
    union = f"union covers the data: {'yes' if not missing else f'no, {len(missing)} left out {_line(missing)}'}"
    return [f"  {equal}", f"  {overlap}", f"  {union}"]
