"""Simulates one step of a training: buckets become ready during the backward, and the link sends
them one after the other.

    computing  |forward|backward ...........................|            |optimizer|
    ready                 0      1             2             3
    link                  |--0--|--1--|        |-----2-----|--3--|late...|
                                                              ^^^^^^^^^^^ exposed

The overlap of computation and communication is not assumed: it results from the queue.

A bucket is sent when all ranks have it, so the slowest rank determines the times. Its time is the
largest of W draws from a normal distribution, which has the distribution Phi(x)^W. The mean of this
maximum grows as sqrt(2 ln W), from 0.56 standard deviations above the mean for two ranks to 4.3 for
65,536 (David and Nagaraja, Order Statistics, 2003). The times of the link follow from the schedules
of `collectives`.
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
_LOW, _HIGH = 0.1, 0.9  # quantiles of the interval: eight steps of ten lie in it
# width of a trapezoid in standard deviations: the integrands are smooth, and the error below 1e-6
_STEP = 0.005
_FAR = 8.0  # standard deviations; the probability beyond is less than 1e-15


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """The other assumptions of a simulation."""

    native: tuple[str, ...] = ("ring",)
    """Schedules that model the backend's own all-reduce: for each message, the fastest of them.
    gloo has a ring; NCCL also has trees.
    """
    link_error: float = 0.0
    """Relative error of the time on the link, such as the residual of a fit."""
    software: float = 0.0
    """Minimum seconds of a collective, on any network: Python, the backend, the ranks' turns on
    shared cores.
    """
    storage: float | None = None
    """Samples per second that a shared storage gives to all ranks together; None: no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The prediction for one step, in seconds. `step` is the sum of `parts`."""

    workers: int
    step: float
    computation: float
    """Seconds of the forwards and backwards of an average rank."""
    optimizer: float
    exposed: float
    """Seconds of communication during which nothing is computed."""
    straggling: float
    """Seconds by which the slowest rank makes a step longer."""
    loading: float
    """Seconds in which the computation waits for data."""
    storage: float
    """Seconds in which all ranks wait for the shared storage."""
    bubble: float
    """Seconds in which a pipeline stage is idle."""
    other: float
    communication: float
    """Seconds in which the link is in use, overlapped or not. Not part of the sum."""
    sent: float
    """Bytes sent by the rank that sends most."""
    low: float
    """One step of ten is faster, given the spread of the computation and the link's error."""
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
        """The name of the largest part of the step."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A row of a plan: the step of one number of ranks."""

    workers: int
    predicted: Predicted
    samples: float
    """Samples of all ranks in a step."""
    efficiency: float
    """Speedup over the base, divided by the ratio of the numbers of ranks."""

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks, without failures."""
        return self.samples / self.predicted.step

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
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
        """Return the cells of the columns in HEAD, the first ones of every plan's table."""
        step = self.predicted
        between = f"{spent(step.low)} .. {spent(step.high)}"
        rate = f"{self.samples_per_s:.4g}"
        return [self.workers, spent(step.step), between, percent(self.efficiency), rate]


HEAD = ("workers", "step", "8 of 10 lie in", "efficiency", "samples/s")
"""The first columns of every plan's table. Eight of ten steps are predicted to lie in the interval.
"""


def spent(seconds: float) -> str:
    """Return a text such as `12.3 ms`, `12.34 s` or `12.34 min`."""
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
    """Simulate one step of `workers` ranks, each with the same work. Raises UsageError for a mesh
    of another size, and if a fact about the model is missing.
    """
    knob.whole("workers", workers)
    world = _World(workers, network, method or Parallelism(), assumed or Assumed())
    late = max(1, round(workers / work.in_turns))  # number of independent delays
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
    """The ranks, their network and their method."""

    workers: int
    network: Network | OneHost
    method: Parallelism
    assumed: Assumed

    def step(self, work: RankWork, deviations: float, fault: int = 0) -> Predicted:
        """Simulate a step in which the slowest rank is `deviations` standard deviations slower than
        the mean, and the link takes `fault` times its error longer.
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
        """Return the standard deviations per step for which other ranks wait. The spread of H
        local steps grows only with sqrt(H). With staleness, a server waits for no rank.
        """
        if self.method.server and self.method.bound > 0:
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
    """Return the work of a rank that is `deviations` standard deviations slower than the mean."""
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
    """Return the expected largest of `draws` draws, in standard deviations above the mean; 0 for
    one draw. It is the integral of 1 - Phi^W above 0, minus that of Phi^W below 0.
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
    """Return the quantile `share` of the largest of `draws` draws, in standard deviations above the
    mean.
    """
    assert 0 < share < 1
    # The tail is small: 1 minus the tail would lose digits.
    return -NormalDist().inv_cdf(-math.expm1(math.log(share) / draws))
