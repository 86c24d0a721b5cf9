"""Batches cut at fixed positions, whichever rank runs them. Batch number n holds the rows from
n * size on, and rank r of W has the numbers r, r + W, ...

No row is padded or dropped: the last batch keeps its true size, and some ranks may have no batch.
So the forward of a batch sees the same rows in the same shape at every world size, and its output
has the same bits on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.config.knob import whole
from lockstep.data.loader import Loader
from lockstep.errors import UsageError
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Piece:
    """One batch: its number, the positions of its rows among all rows, and its data."""

    number: int
    rows: range
    batch: Any


class DatasetRows:
    """The samples of a map-style data set in its own order. Each rank loads only its batches. Can
    be iterated many times.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        world: World,
        *,
        batch: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        device: torch.device | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        """`share`: (this rank's share, the number of shares). Default: one share for each rank."""
        self.size = whole("batch", batch)
        number, shares = share or (world.rank, world.size)
        if isinstance(dataset, Sized) and len(dataset) == 0:
            raise UsageError("empty-dataset", name=f"the data set (a {type(dataset).__name__})")
        # A window has one micro-batch for each share. So batch number n holds the positions from
        # n * batch on, for any world size.
        self._loader = Loader(
            dataset,
            global_batch=self.size * shares,
            micro_batch=self.size,
            seed=seed,
            shuffle=False,
            num_workers=loader_workers,
            collate_fn=collate,
            device=world.device if device is None else device,
            rank=number,
            size=shares,
        )
        self.total = len(dataset)  # type: ignore[arg-type]  # the Loader has checked for __len__
        self.count = -(-self.total // self.size)

    def __iter__(self) -> Iterator[Piece]:
        for epoch in self._loader.epochs(1, start=0):
            for window in epoch:
                for batch, positions in zip(window, window.positions, strict=True):
                    yield Piece(positions.start // self.size, positions, batch)

    def close(self) -> None:
        self._loader.close()


class BatchRows:
    """The rows of one batch that every rank holds: a tensor, or a tuple, list or dict of tensors
    with equal first dimensions.
    """

    def __init__(
        self, all_rows: Any, world: World, *, batch: int, device: torch.device | None = None
    ) -> None:
        self.size = whole("batch", batch)
        self._world = world
        self._all_rows = all_rows
        self._device = world.device if device is None else device
        self.total = _rows_of(all_rows)
        self.count = -(-self.total // self.size)

    def __iter__(self) -> Iterator[Piece]:
        for number in range(self._world.rank, self.count, self._world.size):
            rows = range(number * self.size, min((number + 1) * self.size, self.total))
            yield Piece(number, rows, self._cut(self._all_rows, rows))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _cut(self, part: Any, rows: range) -> Any:
        if isinstance(part, Tensor):
            return part[rows.start : rows.stop].to(self._device)
        if isinstance(part, dict):
            return {name: self._cut(value, rows) for name, value in part.items()}
        return tuple(self._cut(value, rows) for value in part)


Rows = DatasetRows | BatchRows
"""The rows of all ranks, `total` of them in `count` batches of `size` rows; the last batch has the
rest. Iteration yields this rank's batches, in order.
"""


def is_batch(data: Any) -> bool:
    """Whether `data` is one batch of tensors rather than a data set."""
    return isinstance(data, (Tensor, tuple, dict))


def _rows_of(batch: Any) -> int:
    parts = _named_parts(batch)
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.dim() == 0:
            kind = "a 0-d tensor" if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise UsageError("not-a-batch-of-tensors", part=name, kind=kind)
    lengths = {name: len(part) for name, part in parts.items()}
    if not lengths:
        raise UsageError("batch-without-tensors", kind=type(batch).__name__)
    if len(set(lengths.values())) > 1:
        raise UsageError(
            "tensors-of-unequal-length",
            lengths=[f"{length} in {name}" for name, length in lengths.items()],
        )
    total = next(iter(lengths.values()))
    if total == 0:
        raise UsageError("empty-dataset", name="the batch")
    return total


def _named_parts(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        return {"the batch": batch}
    parts = batch if isinstance(batch, dict) else dict(enumerate(batch))
    return {f"part {key!r}": part for key, part in parts.items()}
