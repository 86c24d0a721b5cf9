"""What a training would do with its data, without training: who sees which sample, how evenly, with
how much padding, how random.

The keys of every rank's micro-batches are walked as a Loader walks them; few samples are fetched,
and how many is said (look.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lockstep.config.knob import whole
from lockstep.data.keyed import listed
from lockstep.data.loader import Loader, is_iterable
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.tools.audit.look import Lengths, Looks
from lockstep.tools.finding import Finding, note, ok, wrong
from lockstep.tools.timing.tables import table


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
    findings: list[Finding]

    @property
    def wrong(self) -> bool:
        return any(finding.level == "WRONG" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        verdicts = [
            {"standing": each.level, "about": each.name, "text": each.value}
            for each in self.findings
        ]
        figures = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "findings"
        }
        return {**figures, "verdicts": verdicts, "wrong": self.wrong}

    def table(self) -> str:
        """For people: a line a rank (the first and last of many), then the findings."""
        head = ["rank", "samples", *([] if self.tokens_by_rank is None else ["tokens"])]
        rows: list[list[object]] = [
            list(row) for row in zip(range(self.workers), *self._by_rank(), strict=True)
        ]
        if self.workers > 16:
            rows[8:-4] = [["..."]]
        lines = [f"{each.level:<5}  {each.name:<12}  {each.value}" for each in self.findings]
        return "\n".join([self.described, table(head, rows, left=()), *lines])

    def _by_rank(self) -> list[list[int]]:
        return [
            self.samples_by_rank,
            *([] if self.tokens_by_rank is None else [self.tokens_by_rank]),
        ]


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
    """Audit a map-style data set as `workers` ranks would see it. One process; nothing is trained
    and no rank started.

    Args:
        epochs: how many are walked for coverage.
        micro_batches: most that are made, to measure lengths and padding: those of whole steps,
            spread over the first epoch.
        probes: samples that are fetched several times: twice under one random stream, and once in
            another epoch.

    Raises:
        UsageError: sizes that cannot be cut, an empty or iterable-style data set, or a count below
            1.
    """
    _check(dataset, workers=workers, epochs=epochs, micro_batches=micro_batches, probes=probes)
    loaders = [
        Loader(
            dataset,
            order=order,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            device="cpu",
            rank=rank,
            size=workers,
        )
        for rank in range(workers)
    ]
    total = len(dataset)  # type: ignore[arg-type]  # the Loader has checked that it has a length
    by_epoch = [_seen(loaders, epoch, total) for epoch in range(epochs)]
    _, samples_by_rank = by_epoch[0]
    looks = Looks(dataset, seed, collate)
    steps = _spread(len(loaders[0]), max(1, micro_batches // loaders[0].plan.slots))
    lengths = looks.lengths(_keys(loaders, steps, micro_batches))
    tokens = lengths.by_rank(workers) if lengths.name else None
    probed = _spread(total, probes)
    findings = _covered([seen for seen, _ in by_epoch], chosen=order is not None)
    findings += [
        _balance(samples_by_rank, "samples", "samples an epoch"),
        *_of_batches(lengths, tokens),
        looks.randomness(probed),
    ]
    return Audit(
        samples=total,
        workers=workers,
        epochs=epochs,
        described=loaders[0].describe(),
        samples_by_rank=samples_by_rank,
        tokens_by_rank=tokens,
        padding=lengths.padding,
        looked_at=lengths.batches,
        probed=probed,
        findings=findings,
    )


def _check(dataset: Dataset[Any], **counts: int) -> None:
    for name, value in counts.items():
        whole(name, value)
    if is_iterable(dataset):
        raise UsageError("iterable-audit", kind=type(dataset).__name__)


def _of_batches(lengths: Lengths, tokens: list[int] | None) -> list[Finding]:
    """`tokens`: by rank; None where lengths do not vary."""
    batches = counted(lengths.batches, "micro-batch", "es")
    if lengths.failed:
        return [wrong("batches", lengths.failed)]
    if tokens is None:
        return [ok("padding", f"no field varies in length in {batches}")]
    balance = _balance(tokens, "tokens", f"tokens in {batches}")
    if lengths.padding is None:
        return [balance, ok("padding", "samples vary in length, and their batches are not padded")]
    text = f"{lengths.padding:.1%} of {lengths.name} is padding, in {batches}"
    if lengths.padding > 0.2:
        return [
            balance,
            note("padding", f"{text}: put samples of like length together (lockstep.data.orders)"),
        ]
    return [balance, ok("padding", text)]


def _seen(loaders: list[Loader], epoch: int, total: int) -> tuple[NDArray[np.int64], list[int]]:
    """How often every sample is in the epoch, and how many each rank has."""
    seen, by_rank = np.zeros(total, dtype=np.int64), []
    for loader in loaders:
        mine = 0
        for indices in loader.batch_plan.indices(
            epoch, range(loader.batch_plan.plan(epoch).steps_per_epoch), loader.share
        ):
            np.add.at(seen, indices, 1)
            mine += len(indices)
        by_rank.append(mine)
    return seen, by_rank


def _keys(loaders: list[Loader], steps: list[int], most: int) -> list[tuple[int, list[int]]]:
    """(rank, samples) of the micro-batches of these steps of the first epoch, at most so many."""
    found = []
    for step in steps:
        for loader in loaders:
            found += [
                (loader.rank, indices)
                for indices in loader.batch_plan.indices(0, range(step, step + 1), loader.share)
            ]
    return found[:most]


def _covered(by_epoch: Sequence[NDArray[np.int64]], *, chosen: bool) -> list[Finding]:
    """`chosen`: by an order of the task's own, which may be there to leave out and repeat."""
    last = len(by_epoch) - 1
    found = [
        finding
        for epoch, seen in enumerate(by_epoch)
        for finding in _coverage(seen, epoch, last=epoch == last)
    ]
    return [
        replace(each, level="note") if chosen and each.level == "WRONG" else each for each in found
    ]


def _coverage(seen: NDArray[np.int64], epoch: int, *, last: bool) -> list[Finding]:
    missing, twice = np.flatnonzero(seen == 0).tolist(), np.flatnonzero(seen > 1).tolist()
    found = []
    if missing:
        text = (
            f"epoch {epoch} leaves out {counted(len(missing), 'sample')} of {len(seen)}:"
            f" {listed(missing)}"
        )
        found.append(wrong("coverage", text))
    if twice:
        found.append(
            wrong(
                "duplicates",
                f"epoch {epoch} has {counted(len(twice), 'sample')} more than once:"
                f" {listed(twice)}",
            )
        )
    if not found and last:
        found.append(
            ok("coverage", f"each of {counted(len(seen), 'sample')} once in epoch {epoch}")
        )
    return found


def _balance(by_rank: list[int], about: str, what: str) -> Finding:
    least, most, mean = min(by_rank), max(by_rank), sum(by_rank) / len(by_rank)
    text = (
        f"a rank has {least} to {most} {what}" if least != most else f"every rank has {most} {what}"
    )
    if least == most or mean == 0:
        return ok(about, text)
    text += f": the fullest {most / mean - 1:.1%} above the mean, for which the others wait"
    idle = sum(count == 0 for count in by_rank)
    if idle:
        text += (
            f"; {counted(idle, 'rank')} without any: take fewer workers, or a smaller micro_batch"
        )
    return note(about, text) if most > 1.05 * mean else ok(about, text)


def _spread(total: int, most: int) -> list[int]:
    """At most `most` numbers below `total`, evenly spread, the first and the last among them."""
    return sorted({int(place) for place in np.linspace(0, total - 1, min(most, total))})
