"""Predict one step of a training on any number of ranks: buckets become ready during the backward,
and the link sends them one after the other.

    computing  |forward|backward ...........................|            |optimizer|
    ready                 0      1             2             3
    link                  |--0--|--1--|        |-----2-----|--3--|late...|
                                                              ^^^^^^^^^^^ exposed

The overlap of computation and communication is not assumed: it results from the queue.

A bucket is sent when all ranks have it, so the slowest rank determines the times. Its time is the
largest of W draws from a normal distribution. The mean of this maximum grows as sqrt(2 ln W), from
0.56 standard deviations above the mean for two ranks to 3.6 for 4,096 (Blom, Statistical Estimates
and Transformed Beta-Variables, 1958). The times of the link follow from the schedules
of `collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from lockstep.collectives import Network
from lockstep.errors import UsageError
from lockstep.runs import Settings
from lockstep.tools.plan.communication import WIDTH, CommunicatingRanks, Message, messages
from lockstep.tools.plan.profile import GradientBucket
from lockstep.tools.timing.output_files import megabytes, milliseconds, percent, table

Limit = Literal["computation", "optimizer", "network", "stragglers", "loader", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Work of the rank that has the most micro-batches. Seconds are means."""

    forward: float
    """Seconds of one micro-batch's forward."""
    backward: float
    """Seconds of one micro-batch's backward."""
    micro_batches: int = 1
    optimizer: float = 0.0
    other: float = 0.0
    """Seconds per step that do not depend on the number of micro-batches: Python, records,
    checks.
    """
    loading: float = 0.0
    """Seconds to load a rank's samples of a step, in its own process."""
    spread: float = 0.0
    """Standard deviation of a rank's computation in a step, divided by its mean; independent from
    rank to rank.
    """
    in_turns: float = 1.0
    """Number of ranks that take turns on one core. A rank that is done leaves the core to the
    others, so only the sum of their times can be late.
    """
    buckets: Sequence[GradientBucket] = ()
    """Buckets in the order in which they leave."""
    width: float = WIDTH
    """Bytes per element of a gradient."""
    facts: int = 0
    """Bytes that ranks exchange before the last backward of a step: weights, losses."""
    buffers: int = 0
    """Bytes that are averaged after the gradients in every step: BatchNorm's statistics."""
    software: float = 0.0
    """Minimum seconds of a collective on any network that is not free: Python, the backend, the
    ranks' turns on shared cores.
    """
    samples: float | None = None
    """Samples of all ranks in a step; None if unknown."""
    on_cpus: bool = False
    """Whether reduce="auto" may take the hierarchical sum, as it does between hosts of CPU ranks."""

    @property
    def computation(self) -> float:
        """Seconds of forwards and backwards in a step."""
        return self.micro_batches * (self.forward + self.backward)

    def slowed(self, deviations: float) -> RankWork:
        """Return the work of a rank that is `deviations` standard deviations slower than the mean."""
        by = max(0.0, 1 + deviations * self.spread / math.sqrt(self.in_turns))
        names = ("forward", "backward", "optimizer", "other", "loading")
        return replace(self, **{name: by * getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The prediction for one step, in seconds."""

    workers: int
    parts: Mapping[Limit, float]
    """What the step is the sum of. "network": communication during which nothing is computed;
    "stragglers": by how much the slowest rank makes a step longer.
    """
    communication: float
    """Seconds in which the link is in use, overlapped or not. Not part of the sum."""
    sent: float
    """Bytes sent by the rank that sends most."""
    samples: float | None = None
    efficiency: float = 1.0
    """Speedup over the base, divided by the ratio of the numbers of ranks."""

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def limiting(self) -> Limit:
        """The name of the largest part of the step."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks; None if unknown."""
        return None if self.samples is None else self.samples / self.step

    def as_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "step_ms": 1e3 * self.step,
            "efficiency": self.efficiency,
            "limiting": self.limiting,
            "samples_per_s": self.samples_per_s,
            "bytes_sent": self.sent,
            "exposed_ms": 1e3 * self.parts["network"],
            "communication_ms": 1e3 * self.communication,
            "parts_ms": {name: 1e3 * seconds for name, seconds in self.parts.items()},
        }


def forecasts(
    work_of: Callable[[int], RankWork],
    counts: Sequence[int],
    base: int,
    network: Network,
    method: Settings,
) -> list[Forecast]:
    """Predict a step for each number of ranks. `work_of` returns the work of a rank among so many.
    `base`: the number of ranks that efficiency is relative to.

    Raises UsageError for a method that is not simulated.
    """
    rows = []
    first = _per_rank(simulate(work_of(base), base, network, method))
    for workers in sorted(set(counts)):
        step = simulate(work_of(workers), workers, network, method)
        rows.append(replace(step, efficiency=_per_rank(step) / first))
    return rows


def _per_rank(step: Forecast) -> float:
    """Return the samples of a rank a second; steps a second if a rank always has as many."""
    if step.samples is None:
        return 1 / step.step
    return step.samples / step.step / step.workers


def simulate(
    work: RankWork, workers: int, network: Network, method: Settings | None = None
) -> Forecast:
    """Simulate one step of `workers` ranks, each with the same work. With reduce="auto" between
    several hosts of CPU ranks, this is the faster of the backend's sum and the hierarchical one, as
    in a training.

    Raises UsageError for a method that is not simulated (a server), and for PowerSGD if the
    shapes of the tensors are unknown.
    """
    method = method or Settings(task="step")
    check_method(method)
    if network.between.latency == 0 and math.isinf(network.between.bandwidth):
        work = replace(work, software=0.0)
    ranks = CommunicatingRanks(workers, network, work.software)
    late = max(1, round(workers / work.in_turns))  # number of independent delays
    # the spread of H local steps grows only with sqrt(H)
    deviations = expected_maximum(late) / math.sqrt(method.sync_every or 1)
    step = _step(work, method, ranks)
    parts = {
        **step.parts,
        "stragglers": _step(work.slowed(deviations), method, ranks).step - step.step,
    }
    result = replace(step, parts=parts)
    several_hosts = 1 < network.ranks_per_node < workers
    if several_hosts and work.on_cpus and method.reduce == "auto" and not method.compression:
        other = simulate(work, workers, network, replace(method, reduce="hierarchical"))
        return min(result, other, key=lambda forecast: forecast.step)
    return result


def check_method(method: Settings) -> None:
    """Raise UsageError for a method that is not simulated."""
    if method.server:
        raise UsageError("not-planned", name="update", value=method.update)


def _step(work: RankWork, method: Settings, ranks: CommunicatingRanks) -> Forecast:
    """Simulate a step of ranks that all take as long as `work` says."""
    exposed = busy = sent = 0.0
    if ranks.workers > 1 and method.local is not None:
        exposed, busy, sent = _synchronization(work, method, ranks)
    elif ranks.workers > 1:
        exposed, busy, sent = _every_step(work, method, ranks)
    parts: dict[Limit, float] = {
        "computation": work.computation,
        "optimizer": work.optimizer / (ranks.workers if method.update == "sharded" else 1),
        "network": exposed,
        "stragglers": 0.0,
        "loader": work.loading,
        "other": work.other,
    }
    return Forecast(
        workers=ranks.workers, parts=parts, communication=busy, sent=sent, samples=work.samples
    )


def _every_step(
    work: RankWork, method: Settings, ranks: CommunicatingRanks
) -> tuple[float, float, float]:
    """Return the exposed seconds, the link's busy seconds and the bytes sent if ranks synchronize in
    every step: the facts of a step, all gradients, BatchNorm's buffers, and for a sharded update an
    all-gather of the parameters.
    """
    computed = work.computation
    last_backward = computed - work.backward
    early = [(ranks.small(work.facts), last_backward)]
    late = []
    sends: list[Message] = []
    gathers = []
    for bucket in work.buckets:
        of_bucket = messages(method, bucket, work.width)
        after = [message for message in of_bucket if message.late]
        seconds = ranks.seconds(after)
        late.append((seconds, computed))
        ready = last_backward + bucket.ready * work.backward
        early.append((ranks.seconds(of_bucket) - seconds, ready))
        sends += of_bucket
        if method.update == "sharded":
            gathers.append(Message("all_gather", "ring", work.width * bucket.elements))
    link = busy = 0.0
    for seconds, ready in early + late:
        if seconds:
            link = max(link, ready) + seconds
            busy += seconds
    at_end = ranks.small(work.buffers) + ranks.seconds(gathers)
    exposed = max(computed, link) - computed + at_end
    return exposed, busy + at_end, ranks.sent([*sends, *gathers])


def _synchronization(
    work: RankWork, method: Settings, ranks: CommunicatingRanks
) -> tuple[float, float, float]:
    """Return the same of local steps, divided by H: every H steps, after the backward, replicas send
    the change of their weights. With `overlap`, the next steps are computed at the same time.
    """
    assert method.local is not None
    every = method.sync_every or 1
    sends: list[Message] = []
    for bucket in work.buckets:
        sends += messages(method, bucket, work.width)
    seconds = ranks.seconds(sends)
    hidden = method.local.overlap * (work.computation + work.optimizer)
    return max(0.0, seconds - hidden) / every, seconds / every, ranks.sent(sends) / every


def expected_maximum(draws: int) -> float:
    """Return the expected largest of `draws` draws, in standard deviations above the mean; 0 for
    one draw. Blom's approximation, which is at most 5 % too large.
    """
    return NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


def describe(rows: Sequence[Forecast]) -> str:
    """Return a table with a line for each number of ranks."""
    head = "workers | step | efficiency | samples/s | exposed | sent a step | limiting"
    lines = []
    for row in rows:
        rate = row.samples_per_s
        lines.append(
            (
                row.workers,
                duration(row.step),
                percent(row.efficiency),
                "" if rate is None else f"{rate:.4g}",
                duration(row.parts["network"]),
                megabytes(row.sent),
                f"{row.limiting} {100 * row.parts[row.limiting] / row.step:.0f} %",
            )
        )
    return table(head, lines, left=[6])


def duration(seconds: float) -> str:
    """Return a text such as `12.3 ms`, `12.34 s` or `12.34 min`."""
    if seconds < 10:
        return milliseconds(seconds)
    return f"{seconds:.4g} s" if seconds < 600 else f"{seconds / 60:.4g} min"
