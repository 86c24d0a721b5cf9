"""Simulates one step of a training: buckets become ready during the backward, and the link sends
them one after the other.

    computing  |forward|backward ...........................|            |optimizer|
    ready                 0      1             2             3
    link                  |--0--|--1--|        |-----2-----|--3--|late...|
                                                              ^^^^^^^^^^^ exposed

The overlap of computation and communication is not assumed: it results from the queue.

A bucket is sent when all ranks have it, so the slowest rank determines the times. Its time is the
largest of W draws from a normal distribution, which has the distribution Phi(x)^W. The mean of this
maximum grows as sqrt(2 ln W), from 0.56 standard deviations above the mean for two ranks to 3.6 for
4,096 (David and Nagaraja, Order Statistics, 2003). The times of the link follow from the schedules
of `collectives`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.schedules.network import Network
from lockstep.tools.plan.communication import CommunicatingRanks, communication_of
from lockstep.tools.plan.work import RankWork
from lockstep.tools.timing.output_files import milliseconds

Limit = Literal["computation", "optimizer", "network", "stragglers", "loader", "other"]
# width of a trapezoid in standard deviations: the integrand is smooth, and the error below 1e-6
_STEP = 0.005
_FAR = 8.0  # standard deviations; the probability beyond is less than 1e-15


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
    """Seconds in which the rank loads data."""
    other: float
    communication: float
    """Seconds in which the link is in use, overlapped or not. Not part of the sum."""
    sent: float
    """Bytes sent by the rank that sends most."""

    @property
    def parts(self) -> dict[Limit, float]:
        return {
            "computation": self.computation,
            "optimizer": self.optimizer,
            "network": self.exposed,
            "stragglers": self.straggling,
            "loader": self.loading,
            "other": self.other,
        }

    @property
    def limiting(self) -> Limit:
        """The name of the largest part of the step."""
        parts = self.parts
        return max(parts, key=parts.__getitem__)


def duration(seconds: float) -> str:
    """Return a text such as `12.3 ms`, `12.34 s` or `12.34 min`."""
    if seconds < 10:
        return milliseconds(seconds)
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 60:.4g} min"


def simulate(
    work: RankWork,
    workers: int,
    network: Network,
    method: Parallelism | None = None,
    software: float = 0.0,
) -> Predicted:
    """Simulate one step of `workers` ranks, each with the same work.

    `software`: minimum seconds of a collective on any network: Python, the backend, the ranks' turns
    on shared cores. Raises UsageError for a method that is not simulated (a server, a mesh), and for
    PowerSGD if the shapes of the tensors are unknown.
    """
    knob.whole("workers", workers)
    method = method or Parallelism()
    check_method(method)
    ranks = CommunicatingRanks(workers, network, software)
    late = max(1, round(workers / work.in_turns))  # number of independent delays
    mean = _step(work, method, ranks, 0.0)
    expected = _step(work, method, ranks, expected_maximum(late))
    return replace(mean, step=expected.step, straggling=expected.step - mean.step)


def check_method(method: Parallelism) -> None:
    """Raise UsageError for a method that is not simulated."""
    if method.server:
        raise UsageError("not-planned", name="update", value=method.update)
    if method.mesh is not None:
        raise UsageError("not-planned", name="mesh", value=str(method.mesh))


def _step(
    work: RankWork, method: Parallelism, ranks: CommunicatingRanks, deviations: float
) -> Predicted:
    """Simulate a step in which the slowest rank is `deviations` standard deviations slower than the
    mean. The spread of H local steps grows only with sqrt(H).
    """
    rank = _slowed(work, deviations / math.sqrt(method.sync_every or 1))
    communication = communication_of(method, rank, ranks)
    optimizer = rank.optimizer / (ranks.workers if method.update == "sharded" else 1)
    step = rank.computation + optimizer + rank.other + communication.exposed + rank.loading
    return Predicted(
        workers=ranks.workers,
        step=step,
        computation=rank.computation,
        optimizer=optimizer,
        exposed=communication.exposed,
        straggling=0.0,
        loading=rank.loading,
        other=rank.other,
        communication=communication.busy,
        sent=communication.sent,
    )


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
    deviations = np.arange(0, _FAR + _STEP / 2, _STEP)
    # 1 - Phi(x), which is Phi(-x)
    tail = np.array([math.erfc(deviation / math.sqrt(2)) / 2 for deviation in deviations])
    late = -np.expm1(draws * np.log1p(-tail))
    early = tail**draws
    values = late - early
    ends = (values[0] + values[-1]) / 2
    return float(_STEP * (values.sum() - ends))
