"""The ranks of a run as a grid with four axes. This file does not import torch.

    data       replicas of the model, each with its own micro-batches; gradients are summed along it
    shard      ranks with their own micro-batches that share one model: each holds a part of every
               parameter (FSDP)
    pipeline   ranks that hold consecutive layers
    tensor     ranks that hold a part of the layers' matrices; the innermost axis, so its ranks have
               consecutive numbers

Ranks are numbered in row-major order: the coordinate on the tensor axis changes fastest. All code
that needs the position of a rank uses `Mesh`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from lockstep.config import knob
from lockstep.errors import UsageError

Axis = Literal["data", "shard", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)
Schedule = Literal["naive", "gpipe", "1f1b"]
"""The orders in which a pipeline runs its micro-batches (model_parallel/schedules.py)."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The position of a rank on every axis, from 0."""

    data: int
    shard: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The number of ranks along each axis. Raises UsageError for an invalid number."""

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            count = knob.whole(f"mesh: {axis}", getattr(self, axis), unit="ranks")
            object.__setattr__(self, axis, count)

    @classmethod
    def read(cls, text: str) -> Mesh:
        """Read a text such as `data=2,pipeline=2`. Axes that are left out have one rank. Raises
        UsageError for an invalid text.
        """
        if not isinstance(text, str):
            expected = "a text such as data=2,pipeline=2"
            raise UsageError("wrong-value", name="mesh", value=text, expected=expected)
        source = f"mesh={text!r}"
        counts = knob.pairs(text.split(","), source)
        knob.known(AXES, counts, source, "axis")
        with knob.within(source):
            return cls(
                **{axis: knob.whole(axis, knob.value_of(count)) for axis, count in counts.items()}
            )

    def __str__(self) -> str:
        """Return the text that `read` takes, without axes of one rank."""
        counts = zip(AXES, self.shape, strict=True)
        text = ",".join(f"{axis}={count}" for axis, count in counts if count > 1)
        return text or "data=1"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data, self.shard, self.pipeline, self.tensor

    @property
    def size(self) -> int:
        """The number of ranks of the whole mesh."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """The number of shares into which a step's micro-batches are divided: data x shard."""
        return self.data * self.shard

    @property
    def only_data(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.size == self.data

    def check_size(self, workers: int) -> None:
        """Raise a UsageError if mesh and run have different numbers of ranks."""
        if self.size != workers:
            product = str(self).replace("=", " ").replace(",", " x ")
            raise UsageError(
                "mesh-of-other-size",
                mesh=str(self),
                size=self.size,
                product=product,
                workers=workers,
            )

    def at(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank."""
        assert 0 <= rank < self.size
        rank, tensor = divmod(rank, self.tensor)
        rank, pipeline = divmod(rank, self.pipeline)
        data, shard = divmod(rank, self.shard)
        return Coordinates(data, shard, pipeline, tensor)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at these coordinates."""
        replica = at.data * self.shard + at.shard
        return (replica * self.pipeline + at.pipeline) * self.tensor + at.tensor

    def line(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks whose coordinates differ from those of `rank` on these axes only, in
        order. `rank` is one of them.
        """
        position = self.at(rank)
        ranges = []
        for axis in AXES:
            number = getattr(position, axis)
            along = range(getattr(self, axis)) if axis in axes else range(number, number + 1)
            ranges.append(along)
        return tuple(self.rank(Coordinates(*numbers)) for numbers in product(*ranges))

    def share(self, rank: int) -> int:
        """Return which of the `replicas` shares of a step `rank` works on. Ranks that differ only
        on the pipeline and tensor axes work on the same share.
        """
        return rank // (self.pipeline * self.tensor)
