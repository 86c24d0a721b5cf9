"""Which rank stands where: the ranks of a run as a grid of four axes, and nothing else. No torch
here.

    data       replicas of the model, each with its own micro-batches; gradients are summed along it
    shard      ranks with their own micro-batches that share one model: each holds a part of every
               parameter (FSDP)
    pipeline   ranks that hold consecutive layers
    tensor     ranks that hold a part of the layers' matrices; the innermost, neighbours in the
               numbering

Ranks are numbered like the digits of a number, tensor last. Everything that must know who does what
asks this object.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from lockstep.config import knob
from lockstep.errors import UsageError

Axis = Literal["data", "shard", "pipeline", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's place along every axis, from 0."""

    data: int
    shard: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How many ranks there are along each axis. Raises UsageError for what is no number of
    ranks.
    """

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
        """`data=2,pipeline=2`; axes that are left out have one rank. Raises UsageError."""
        where = f"mesh={text!r}"
        found = knob.pairs(text.split(","), where)
        knob.known(AXES, found, where, "axis")
        with knob.within(where):
            return cls(**{axis: knob.whole(axis, knob.value_of(found[axis])) for axis in found})

    def __str__(self) -> str:
        """As `read` takes it, without axes of one rank."""
        return (
            ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
            or "data=1"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, each.name) for each in fields(self))

    @property
    def size(self) -> int:
        """Ranks of the whole mesh."""
        return math.prod(self.shape)

    @property
    def replicas(self) -> int:
        """In how many shares a step's micro-batches are dealt out: data x shard."""
        return self.data * self.shard

    @property
    def only_data(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.size == self.data

    def check_size(self, workers: int) -> None:
        """Raise a UsageError where the mesh has another number of ranks than the run."""
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
        """Where a rank stands."""
        assert 0 <= rank < self.size
        places = []
        for count in reversed(self.shape):
            rank, place = divmod(rank, count)
            places.append(place)
        return Coordinates(*reversed(places))

    def rank(self, at: Coordinates) -> int:
        """Who stands there."""
        found = 0
        for axis in AXES:
            found = found * getattr(self, axis) + getattr(at, axis)
        return found

    def line(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The ranks that differ from `rank` in nothing but these axes, in order, `rank` among
        them.
        """
        here = self.at(rank)
        places = (
            range(getattr(self, axis)) if axis in axes else (getattr(here, axis),) for axis in AXES
        )
        return tuple(self.rank(Coordinates(*place)) for place in itertools.product(*places))

    def share(self, rank: int) -> int:
        """Which of the `replicas` shares of a step this rank's model works on. Equal for all
        ranks that hold parts of one layer stack.
        """
        here = self.at(rank)
        return here.data * self.shard + here.shard
