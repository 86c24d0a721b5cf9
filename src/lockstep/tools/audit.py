"""Checks how a training would use its data, without training: which rank gets which samples, the
balance between ranks, the share of padding, and the randomness of samples.

It walks the indices of every rank's micro-batches as a Loader does. It fetches few samples, and
reports how many: for lengths and padding, and to check that randomness follows the seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.config.knob import whole
from lockstep.data.keyed import fetches_at_once, listed
from lockstep.data.loader import Loader, is_iterable
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.runtime import randomness
from lockstep.runtime.host_generators import Numpy, Random, Torch
from lockstep.tools.finding import Finding, note, ok, wrong
from lockstep.tools.timing.output_files import table

_ABOUT = "augmentation"


@dataclass(slots=True)
class Lengths:
    """Lengths of samples, in the first field whose first dimension varies between samples. A token
    is a row of this field.
    """

    batches: int = 0
    name: str = ""
    """Name of the field, such as "field 0"; "" if no field varies."""
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(rank, tokens of its samples) for each micro-batch."""
    padding: float | None = None
    """Share of the padded field that is padding; None if batches are not padded."""
    failed: str = ""
    """Why a micro-batch could not be made."""

    def by_rank(self, workers: int) -> list[int]:
        return [
            sum(count for rank, count in self.tokens if rank == each) for each in range(workers)
        ]


class Looks:
    """Fetches samples and makes batches under their random streams, as a Loader does. Restores the
    process's own generator states.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = collate or default_collate
        self._at_once = fetches_at_once(dataset)

    def lengths(self, keys: list[tuple[int, list[int]]]) -> Lengths:
        """Measure the samples of these micro-batches, each (rank, indices), in the first epoch."""
        found = Lengths()
        parts: list[tuple[int, list[dict[str, int]], dict[str, Tensor]]] = []
        for rank, indices in keys:
            samples = [self._watched(0, index)[0] for index in indices]
            lengths = [{name: len(part) for name, part in _fields(sample)} for sample in samples]
            try:
                batch = dict(_fields(self._batch(samples, indices[0])))
            except Exception as error:
                reason = next(iter(str(error).splitlines()), "")
                found.failed = (
                    f"samples {listed(indices)} cannot be made a batch: {type(error).__name__}:"
                    f" {reason}"
                )
                return found
            parts.append(
                (
                    rank,
                    lengths,
                    {
                        name: part
                        for name, part in batch.items()
                        if part.dim() >= 2 and len(part) == len(samples)
                    },
                )
            )
            found.batches += 1
        seen: defaultdict[str, set[int]] = defaultdict(set)
        for _, lengths, _ in parts:
            for name, length in (item for sample in lengths for item in sample.items()):
                seen[name].add(length)
        found.name = next((name for name, different in seen.items() if len(different) > 1), "")
        if found.name:
            found.tokens = [
                (rank, sum(sample.get(found.name, 0) for sample in lengths))
                for rank, lengths, _ in parts
            ]
            padded = [
                len(lengths) * batch[found.name].shape[1] if found.name in batch else 0
                for _, lengths, batch in parts
            ]
            if all(padded):
                found.padding = max(0.0, 1 - sum(count for _, count in found.tokens) / sum(padded))
        return found

    def randomness(self, indices: list[int]) -> Finding:
        """Check that samples depend on (seed, epoch, index) only: fetched twice, a sample is
        equal; in another epoch it differs.
        """
        constant: list[int] = []
        ends: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for index in indices:
            first, moved = self._watched(0, index)
            again, _ = self._watched(0, index)
            equal = _same(first, again)
            if equal is None:
                return note(
                    _ABOUT,
                    f"sample {index} holds a {_odd(first)}, which cannot be compared, so it was"
                    " not checked",
                )
            if not equal:
                return wrong(
                    _ABOUT,
                    f"sample {index} differs when it is read twice in epoch 0. It draws from its own"
                    " generator: use torch, numpy.random or random, which Lockstep seeds",
                )
            later, moved_later = self._watched(1, index)
            if _same(first, later):
                constant.append(index)
            for epoch, states in enumerate((moved, moved_later)):
                for state in states:
                    ends[state].append((epoch, index))
        for (a, one), (b, other) in (places[:2] for places in ends.values() if len(places) > 1):
            return wrong(
                _ABOUT,
                f"sample {one} in epoch {a} and sample {other} in epoch {b} leave the same random"
                " state, so both get the same noise. The data set seeds a global generator: remove"
                " manual_seed or random.seed from it",
            )
        if not constant:
            return ok(
                _ABOUT,
                f"different in every epoch, and the same on every rank, {len(indices)} samples"
                " checked",
            )
        looked = f"({len(constant)} of {len(indices)} checked)"
        if len(constant) == len(indices):
            return note(
                _ABOUT,
                f"sample {constant[0]} is the same in epochs 0 and 1 {looked}: no augmentation, or"
                " not random",
            )
        text = (
            f"samples {listed(constant)} are the same in epochs 0 and 1 {looked}, the others differ"
        )
        return note(_ABOUT, f"{text}: augmentation is random, or depends on the kind of sample")

    def _watched(self, epoch: int, index: int) -> tuple[Any, list[str]]:
        """Fetch a sample. Returns it with the new states of the global generators that it used."""
        generators = (Torch(), Numpy(), Random())
        with randomness.preserved():
            randomness.sample(self._seed, epoch, index)
            before = [repr(generator.look()) for generator in generators]
            sample = self._fetch(index)
            after = [repr(generator.look()) for generator in generators]
        return sample, [now for then, now in zip(before, after, strict=True) if then != now]

    def _fetch(self, index: int) -> Any:
        return self._dataset.__getitems__([index])[0] if self._at_once else self._dataset[index]

    def _batch(self, samples: list[Any], first: int) -> Any:
        with randomness.preserved():
            randomness.collate(self._seed, 0, first)
            return self._collate(samples)


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays in a sample or batch that have a first dimension, each with a
    name for its place.
    """
    if isinstance(value, np.ndarray):
        value = (
            torch.from_numpy(value)
            if value.dtype.kind in "biufc"
            else torch.empty(value.shape, dtype=torch.uint8)
        )
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield name or "the sample", value
    elif isinstance(value, (tuple, list, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _fields(part, f"{name}.{key}" if name else f"field {key}")


def _same(one: Any, other: Any) -> bool | None:
    """Whether two samples are equal, with nan equal to nan; None if they cannot be compared."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.shape == other.shape and one.dtype == other.dtype and _bytes(one) == _bytes(other)
        )
    if isinstance(one, np.ndarray):
        return bool(
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and _all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and _all(_same(a, b) for a, b in zip(one, other, strict=True))
    if hasattr(one, "tobytes"):  # images
        return bool(one.tobytes() == other.tobytes())
    compared: Any = type(one).__eq__
    if compared is object.__eq__:
        return None
    return bool(one == other) or (one != one and other != other)


def _all(found: Iterator[bool | None]) -> bool | None:
    each = list(found)
    return False if False in each else None if None in each else True


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _odd(value: Any) -> str:
    """Return the name of the type in a sample that cannot be compared."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((_odd(part) for part in value if _same(part, part) is None), "")
    return type(value).__name__


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The result of an audit. `wrong` says whether it found an error."""

    samples: int
    workers: int
    epochs: int
    described: str
    """How a step is divided into micro-batches and shared among ranks."""
    samples_by_rank: list[int]
    """Samples of each rank in the first epoch."""
    tokens_by_rank: list[int] | None
    """Tokens of each rank in the micro-batches looked at; None if no field varies in length."""
    padding: float | None
    """Share of a padded field that is padding, in the micro-batches looked at; None if unknown."""
    looked_at: int
    """Number of micro-batches that were made to measure lengths and padding."""
    probed: list[int]
    """Indices of the samples that were fetched several times."""
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
        """Return a text with a line for each rank (of many, the first and last), then the
        findings.
        """
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
    """Audit a map-style data set as `workers` ranks would see it. It runs in this process, trains
    nothing and starts no ranks.

    Args:
        epochs: number of epochs that are checked for missing and repeated samples.
        micro_batches: maximum number of micro-batches that are made to measure lengths and
            padding. They belong to whole steps, spread over the first epoch.
        probes: number of samples that are fetched several times: twice under one random stream,
            and once in another epoch.

    Raises:
        UsageError: the batch sizes are invalid, the data set is empty or iterable-style, or a count
            is below 1.
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
    """Judge balance and padding. `tokens`: those of each rank; None if lengths do not vary."""
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
            note("padding", f"{text}: use an order by length (lockstep.data.orders)"),
        ]
    return [balance, ok("padding", text)]


def _seen(loaders: list[Loader], epoch: int, total: int) -> tuple[NDArray[np.int64], list[int]]:
    """Count how often the epoch has each sample, and how many samples each rank has."""
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
    """Return (rank, indices) of at most `most` micro-batches of these steps of the first epoch."""
    found = []
    for step in steps:
        for loader in loaders:
            found += [
                (loader.rank, indices)
                for indices in loader.batch_plan.indices(0, range(step, step + 1), loader.share)
            ]
    return found[:most]


def _covered(by_epoch: Sequence[NDArray[np.int64]], *, chosen: bool) -> list[Finding]:
    """Judge coverage. `chosen`: the order is the task's own, and may repeat or leave out samples
    on purpose.
    """
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
    text += f": the fullest {most / mean - 1:.1%} above the mean; the others wait for it"
    idle = sum(count == 0 for count in by_rank)
    if idle:
        text += f"; {counted(idle, 'rank')} have none: use fewer workers, or a smaller micro_batch"
    return note(about, text) if most > 1.05 * mean else ok(about, text)


def _spread(total: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers below `total`, with the first and the last."""
    return sorted({int(place) for place in np.linspace(0, total - 1, min(most, total))})
