"""What a training would do with its data, without training: who sees which sample, how evenly, with how much padding, how random.

The keys of every rank's micro-batches are walked as a Loader walks them; few samples are fetched, and how many is said (look.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.data.audit.look import Lengths, Looks
from lockstep.data.keyed import listed
from lockstep.data.loader import Loader, is_iterable
from lockstep.data.windows import counted, whole
from lockstep.errors import UsageError

Standing = Literal["ok", "note", "WRONG"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the audit. "WRONG" is what makes a training other than it says."""

    standing: Standing
    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.standing:<5}  {self.about:<12}  {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What was found. `wrong` says whether something is."""

    samples: int
    workers: int
    epochs: int
    described: str
    """How a step is cut and shared."""
    samples_by_rank: list[int]
    """Of one epoch, the first."""
    tokens_by_rank: list[int] | None
    """In the micro-batches looked at; None where the samples have no length that varies."""
    padding: float | None
    """Share of the numbers of a padded field that are padding, in the micro-batches looked at."""
    looked_at: int
    """Micro-batches that were made for it."""
    probed: list[int]
    """Samples that were fetched several times."""
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(verdict.standing == "WRONG" for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "wrong": self.wrong}

    def table(self) -> str:
        """For people: a line a rank (the first and last of many), then the verdicts."""
        lines = [self.described, f"{'rank':>5}  {'samples':>9}" + ("" if self.tokens_by_rank is None else f"  {'tokens':>9}")]
        for rank, samples in enumerate(self.samples_by_rank):
            if self.workers > 16 and 8 <= rank < self.workers - 4:
                lines += ["  ..."] if rank == 8 else []
                continue
            lines.append(f"{rank:>5}  {samples:>9}" + ("" if self.tokens_by_rank is None else f"  {self.tokens_by_rank[rank]:>9}"))
        return "\n".join([*lines, *map(str, self.verdicts)])


def audit(
    dataset: Dataset[Any],
    *,
    global_batch: int,
    micro_batch: int,
    workers: int = 8,
    epochs: int = 2,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    order: Any = None,
    micro_batches: int = 64,
    probes: int = 8,
) -> Audit:
    """Audit a map-style data set as `workers` ranks would see it. One process; nothing is trained and no rank started.

    Args:
        epochs: how many are walked for coverage.
        micro_batches: most that are made, to measure lengths and padding: those of whole steps, spread over the first epoch.
        probes: samples that are fetched several times: twice under one random stream, and once in another epoch.

    Raises:
        UsageError: sizes that cannot be cut, an empty or iterable-style data set, or a count below 1.
    """
    for name, value in (("workers", workers), ("epochs", epochs), ("micro_batches", micro_batches), ("probes", probes)):
        whole(name, value)
    if is_iterable(dataset):
        raise UsageError(f"{type(dataset).__name__} is iterable: an audit asks for samples by their number, and a stream's have none")
    loaders = [
        Loader(dataset, order=order, global_batch=global_batch, micro_batch=micro_batch, seed=seed, device="cpu", rank=rank, size=workers)
        for rank in range(workers)
    ]
    total = len(dataset)  # type: ignore[arg-type]  # the Loader has checked that it has a length
    verdicts, by_rank = [], [0] * workers
    for epoch in range(epochs):
        seen, of_rank = _seen(loaders, epoch, total)
        by_rank = by_rank if epoch else of_rank
        found = _coverage(seen, epoch, epochs)
        if order is not None:  # leaving out and repeating may be what it is for
            found = [replace(each, standing="note") if each.standing == "WRONG" else each for each in found]
        verdicts += found
    verdicts.append(_balance(by_rank, "samples", "samples an epoch"))
    looks = Looks(dataset, seed, collate)
    steps = _spread(len(loaders[0]), max(1, micro_batches // loaders[0].plan.slots))
    lengths = looks.lengths(_keys(loaders, steps, micro_batches))
    tokens = lengths.by_rank(workers) if lengths.varies else None
    if lengths.failed:
        verdicts.append(Verdict("WRONG", "batches", lengths.failed))
    elif tokens is not None:
        verdicts += [_balance(tokens, "tokens", f"tokens in {counted(lengths.batches, 'micro-batch', 'es')}"), _padding(lengths)]
    else:
        verdicts.append(Verdict("ok", "padding", f"no field varies in length in {counted(lengths.batches, 'micro-batch', 'es')}"))
    probed = _spread(total, probes)
    verdicts += [Verdict(*found) for found in looks.randomness(probed)]
    return Audit(
        samples=total,
        workers=workers,
        epochs=epochs,
        described=loaders[0].describe(),
        samples_by_rank=by_rank,
        tokens_by_rank=tokens,
        padding=lengths.padding,
        looked_at=lengths.batches,
        probed=probed,
        verdicts=verdicts,
    )


def _seen(loaders: list[Loader], epoch: int, total: int) -> tuple[NDArray[np.int64], list[int]]:
    """How often every sample is in the epoch, and how many each rank has."""
    seen, by_rank = np.zeros(total, dtype=np.int64), []
    for loader in loaders:
        mine = 0
        for indices in loader.course.indices(epoch, range(loader.course.plan(epoch).steps_per_epoch), loader.share):
            np.add.at(seen, indices, 1)
            mine += len(indices)
        by_rank.append(mine)
    return seen, by_rank


def _keys(loaders: list[Loader], steps: list[int], most: int) -> list[tuple[int, list[int]]]:
    """(rank, samples) of the micro-batches of these steps of the first epoch, at most so many."""
    found = []
    for step in steps:
        for loader in loaders:
            found += [(loader.rank, indices) for indices in loader.course.indices(0, range(step, step + 1), loader.share)]
    return found[:most]


def _coverage(seen: NDArray[np.int64], epoch: int, epochs: int) -> list[Verdict]:
    missing, twice = np.flatnonzero(seen == 0).tolist(), np.flatnonzero(seen > 1).tolist()
    found = []
    if missing:
        text = f"epoch {epoch} leaves out {counted(len(missing), 'sample')} of {len(seen)}: {listed(missing)}"
        found.append(Verdict("WRONG", "coverage", text))
    if twice:
        text = f"epoch {epoch} has {counted(len(twice), 'sample')} more than once: {listed(twice)}"
        found.append(Verdict("WRONG", "duplicates", text))
    if not found and epoch == epochs - 1:
        found.append(Verdict("ok", "coverage", f"each of {counted(len(seen), 'sample')} once in epoch {epoch}"))
    return found


def _balance(by_rank: list[int], about: str, what: str) -> Verdict:
    least, most, mean = min(by_rank), max(by_rank), sum(by_rank) / len(by_rank)
    text = f"a rank has {least} to {most} {what}" if least != most else f"every rank has {most} {what}"
    if least == most or mean == 0:
        return Verdict("ok", about, text)
    text += f": the fullest {most / mean - 1:.1%} above the mean, for which the others wait"
    idle = sum(count == 0 for count in by_rank)
    if idle:
        text += f"; {counted(idle, 'rank')} without any: take fewer workers, or a smaller micro_batch"
    return Verdict("note" if most > 1.05 * mean else "ok", about, text)


def _padding(lengths: Lengths) -> Verdict:
    if lengths.padding is None:
        return Verdict("ok", "padding", "samples vary in length, and their batches are not padded")
    text = f"{lengths.padding:.1%} of {lengths.name} is padding, in {counted(lengths.batches, 'micro-batch', 'es')}"
    if lengths.padding > 0.2:
        return Verdict("note", "padding", f"{text}: put samples of like length together (lockstep.data.orders)")
    return Verdict("ok", "padding", text)


def _spread(total: int, most: int) -> list[int]:
    """At most `most` numbers below `total`, evenly spread, the first and the last among them."""
    return sorted({int(place) for place in np.linspace(0, total - 1, min(most, total))})
