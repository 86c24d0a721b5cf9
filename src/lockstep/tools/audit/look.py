"""Looking at samples as an audit does: how long they are, how much of a batch is padding, and
whether their randomness is keyed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.data.keyed import fetches_at_once, listed
from lockstep.runtime import randomness
from lockstep.runtime.host_generators import Numpy, Random, Torch
from lockstep.tools.finding import Finding, note, ok, wrong

_ABOUT = "augmentation"


@dataclass(slots=True)
class Lengths:
    """Of the fields whose first dimension is not the same in all samples, the first; tokens are
    its rows.
    """

    batches: int = 0
    name: str = ""
    """Of the field, such as "field 0"; "" where none varies."""
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(rank, rows of its samples), a micro-batch."""
    padding: float | None = None
    failed: str = ""
    """Why a micro-batch could not be made."""

    def by_rank(self, workers: int) -> list[int]:
        return [
            sum(count for rank, count in self.tokens if rank == each) for each in range(workers)
        ]


class Looks:
    """Fetches samples and makes batches under their random streams, as a Loader does; the
    process's own states are put back.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = collate or default_collate
        self._at_once = fetches_at_once(dataset)

    def lengths(self, keys: list[tuple[int, list[int]]]) -> Lengths:
        """Of the samples of these micro-batches, (rank, indices) each, in the first epoch."""
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
        """Whether samples belong to (seed, epoch, index): fetched twice equal, and in another
        epoch not.
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
                    f"sample {index} holds a {_odd(first)}, which cannot be compared: not"
                    " looked at",
                )
            if not equal:
                text = (
                    f"sample {index} differs when it is fetched twice in epoch 0, so it depends on"
                    " who fetches it: it draws from a generator "
                )
                return wrong(
                    _ABOUT,
                    text + "of its own; draw from torch, numpy.random or random, which are keyed",
                )
            later, moved_later = self._watched(1, index)
            if _same(first, later):
                constant.append(index)
            for epoch, states in enumerate((moved, moved_later)):
                for state in states:
                    ends[state].append((epoch, index))
        for (a, one), (b, other) in (places[:2] for places in ends.values() if len(places) > 1):
            text = (
                f"sample {one} in epoch {a} and sample {other} in epoch {b} leave the same random"
                " state: the data set seeds a global "
            )
            return wrong(
                _ABOUT,
                text
                + "generator itself (manual_seed, random.seed), so that both get the same noise;"
                " do not",
            )
        if not constant:
            return ok(
                _ABOUT,
                f"another in every epoch and the same whoever fetches it, {len(indices)} samples"
                " looked at",
            )
        looked = f"({len(constant)} of {len(indices)} looked at)"
        if len(constant) == len(indices):
            return note(
                _ABOUT,
                f"sample {constant[0]} is the same in epochs 0 and 1 {looked}: no augmentation, or"
                " not random",
            )
        text = (
            f"samples {listed(constant)} are the same in epochs 0 and 1 {looked}, the others differ"
        )
        return note(_ABOUT, f"{text}: augmented by chance, or by kind")

    def _watched(self, epoch: int, index: int) -> tuple[Any, list[str]]:
        """A sample, and the states in which it left the global generators that it moved."""
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
    """The tensors and arrays in a sample or batch that have a first dimension, each with its
    place.
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
    """Whether two samples are equal, nan to nan; None where they hold what cannot be compared."""
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
    """The type in a sample that cannot be compared."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((_odd(part) for part in value if _same(part, part) is None), "")
    return type(value).__name__
