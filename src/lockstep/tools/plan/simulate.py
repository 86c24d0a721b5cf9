"""One step of a training that nobody runs: buckets get ready in the backward, and go over the link
one after the other.

    computing  |forward|backward ...........................|            |optimizer|
    ready                 0      1             2             3
    link                  |--0--|--1--|        |-----2-----|--3--|late...|
                                                              ^^^^^^^^^^^ exposed

Nothing is said of an overlap: it is what the queue leaves of it. All ranks must have a bucket
before it leaves, so the clock is that of the slowest rank, the largest of W draws from a normal
distribution: it has the distribution Phi(x)^W, whose mean grows as sqrt(2 ln W), from 0.56 standard
deviations above the mean for two ranks to 4.3 for 65,536 (David and Nagaraja, Order Statistics,
2003). How long the link takes is what the schedules of `collectives` say of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from lockstep.collectives.network import Network
from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import OneHost
from lockstep.tools.plan.communication import TalkingRanks, talk
from lockstep.tools.plan.work import MeshShare, RankWork, share
from lockstep.tools.timing.output_files import milliseconds, percent

Limit = Literal[
    "computation", "optimizer", "network", "stragglers", "loader", "storage", "bubble", "other"
]
_LOW, _HIGH = 0.1, 0.9  # of the interval: eight steps of ten lie in it
# of the trapezoids, in standard deviations: the integrands are smooth, and the error below 1e-6
_STEP = 0.005
_FAR = 8.0  # standard deviations; beyond them lies less than 1e-15


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What else is taken for granted."""

    native: tuple[str, ...] = ("ring",)
    """The schedules that stand for the backend's own all-reduce: the quickest of them for each
    message. gloo has a ring, NCCL trees too.
    """
    link_error: float = 0.0
    """By how much of itself the time on the link may be wrong: of a fit, its residual."""
    software: float = 0.0
    """Seconds that a collective takes at the least, however quick the network is: Python, the
    backend, the ranks' turns on shared cores.
    """
    storage: float | None = None
    """Samples a second that all ranks together are given; None: as many as they ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One step. Seconds; `step` is the sum of `parts`."""

    workers: int
    step: float
    computation: float
    """Forwards and backwards of a mean rank."""
    optimizer: float
    exposed: float
    """Communication behind which nothing was computed."""
    straggling: float
    """By which the slowest rank makes a step longer."""
    loading: float
    """For which the computation waits."""
    storage: float
    """For which all ranks wait, since what they share gives no more."""
    bubble: float
    """A pipeline's."""
    other: float
    communication: float
    """How long the link is in use, hidden or not. No part of the sum."""
    sent: float
    """Bytes, by the rank that sends most."""
    low: float
    """One step of ten is quicker, by the spread of the computation and the error of the link."""
    high: float
    """One step of ten is slower."""

    @property
    def parts(self) -> dict[Limit, float]:
        return {
            "computation": self.computation,
            "optimizer": self.optimizer,
            "network": self.exposed,
            "stragglers": self.straggling,
            "loader": self.loading,
            "storage": self.storage,
            "bubble": self.bubble,
            "other": self.other,
        }

    @property
    def limiting(self) -> Limit:
        """What takes the largest part of the step."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A step of so many ranks, as a plan tells it."""

    workers: int
    predicted: Predicted
    samples: float
    """Of all ranks in a step."""
    efficiency: float
    """Speedup over the ranks that it is compared with, over the ratio of their numbers."""

    @property
    def samples_per_s(self) -> float:
        """While nothing fails."""
        return self.samples / self.predicted.step

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        step = self.predicted
        return {
            "step_ms": 1e3 * step.step,
            "efficiency": self.efficiency,
            "limiting": step.limiting,
            "samples_per_s": self.samples_per_s,
            "low_ms": 1e3 * step.low,
            "high_ms": 1e3 * step.high,
        }

    def cells(self) -> list[object]:
        """The columns that every plan's table begins with: HEAD."""
        step = self.predicted
        between = f"{spent(step.low)} .. {spent(step.high)}"
        rate = f"{self.samples_per_s:.4g}"
        return [self.workers, spent(step.step), between, percent(self.efficiency), rate]


HEAD = ("workers", "step", "8 of 10 lie in", "efficiency", "samples/s")
"""Of the steps, eight of ten are predicted to lie in the interval."""


def spent(seconds: float) -> str:
    """`12.3 ms`, `12.34 s`, `12.34 min`."""
    if seconds < 10:
        return milliseconds(seconds)
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 60:.4g} min"


def simulate(
    work: RankWork,
    workers: int,
    network: Network | OneHost,
    method: Parallelism | None = None,
    assumed: Assumed | None = None,
) -> Predicted:
    """One step of so many ranks, each with that work. Raises UsageError for a mesh of another
    size, and for what is not known of the model.
    """
    knob.whole("workers", workers)
    world = _World(workers, network, method or Parallelism(), assumed or Assumed())
    late = max(1, round(workers / work.in_turns))  # who can be late by themselves
    mean, expected = world.step(work, 0.0), world.step(work, expected_maximum(late))
    return replace(
        mean,
        step=expected.step,
        straggling=expected.step - mean.step,
        low=world.step(work, quantile_of_maximum(_LOW, late), -1).step,
        high=world.step(work, quantile_of_maximum(_HIGH, late), 1).step,
    )


@dataclass(frozen=True, slots=True)
class _World:
    """So many ranks, what connects them, and how they go about it."""

    workers: int
    network: Network | OneHost
    method: Parallelism
    assumed: Assumed

    def step(self, work: RankWork, deviations: float, fault: int = 0) -> Predicted:
        """In which the slowest rank is so many standard deviations slow, and the link takes
        `fault` times its error longer.
        """
        rank = _slowed(work, self._met(deviations))
        ranks = TalkingRanks(
            self.workers,
            self.network,
            self.assumed.native,
            1 + fault * self.assumed.link_error,
            self.assumed.software,
        )
        part = self._share(rank)
        if part is not None:
            rank = part.work
        found = talk(self.method, rank, ranks, part)
        optimizer = rank.optimizer / (self.workers if self.method.update == "sharded" else 1)
        bubble = 0.0 if part is None else part.idle
        own = rank.computation + optimizer + rank.other + bubble + found.exposed
        loading = max(0.0, rank.loading - own) if rank.ahead else rank.loading
        asked = self.workers * work.samples / self.assumed.storage if self.assumed.storage else 0.0
        storage = max(0.0, asked - own - loading)
        step = own + loading + storage
        return Predicted(
            workers=self.workers,
            step=step,
            computation=rank.computation,
            optimizer=optimizer,
            exposed=found.exposed,
            straggling=0.0,
            loading=loading,
            storage=storage,
            bubble=bubble,
            other=rank.other,
            communication=found.busy,
            sent=found.sent,
            low=step,
            high=step,
        )

    def _met(self, deviations: float) -> float:
        """The deviations of one step for which the others wait: of H steps, the sum's spread
        grows as their root only; a server waits for nobody.
        """
        if self.method.server is not None and self.method.bound > 0:
            return 0.0
        return deviations / math.sqrt(self.method.sync_every or 1)

    def _share(self, rank: RankWork) -> MeshShare | None:
        mesh = self.method.mesh
        if mesh is None:
            return None
        mesh.check_size(self.workers)
        if isinstance(self.network, OneHost):
            raise UsageError("not-measured-here", name="mesh", value=str(mesh))
        return share(rank, mesh, self.network) if not mesh.only_data else None


def _slowed(work: RankWork, deviations: float) -> RankWork:
    """What a rank computes, by so many standard deviations later than usual."""
    by = max(0.0, 1 + deviations * work.spread / math.sqrt(work.in_turns))
    return replace(
        work,
        forward=by * work.forward,
        backward=by * work.backward,
        optimizer=by * work.optimizer,
        other=by * work.other,
        loading=by * work.loading,
    )


@lru_cache(maxsize=1024)
def expected_maximum(draws: int) -> float:
    """In standard deviations above the mean; 0 for one draw. The integral of 1 - Phi^W above 0,
    less that of Phi^W below it.
    """
    assert draws >= 1
    above = np.arange(0, _FAR + _STEP / 2, _STEP)
    # 1 - Phi(x), which is Phi(-x)
    tail = np.array([0.5 * math.erfc(each / math.sqrt(2)) for each in above])
    late = -np.expm1(draws * np.log1p(-tail))
    early = tail**draws
    values = late - early
    return float(_STEP * (values.sum() - (values[0] + values[-1]) / 2))


def quantile_of_maximum(share: float, draws: int) -> float:
    """What the largest of so many draws stays below in this share of the cases, in standard
    deviations above the mean.
    """
    assert 0 < share < 1
    # the tail is small, and 1 less it would lose its digits
    return -NormalDist().inv_cdf(-math.expm1(math.log(share) / draws))
