"""Measure a task: the phases of a step, and when each bucket of gradients is complete.

Several ranks of this host train side by side and start every step together, but do not exchange
gradients. So they share memory bandwidth and caches as in a real training, and the times contain no
communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import Task, init, launch
from lockstep.errors import UsageError
from lockstep.runs import Settings
from lockstep.timing import RecordedStep, Recording, Trial, facts_bytes, recording, trial
from lockstep.tools.timing.output_files import counted, percent, table

_WARM_UP = 3  # steps: the second one orders the buckets by arrival
_FEWEST = 8  # steps, with those that warm up
_MESSAGES = 41
_NEVER = 10**9  # steps between two synchronizations
_HEAD = "ranks | threads | steps | loading | forward | backward | optimizer | other | spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientBucket:
    """A bucket of gradients, and when it is ready to send."""

    ready: float
    """The share of the last micro-batch's backward after which the bucket is complete, 0 to 1."""
    elements: int
    tensors: Sequence[tuple[int, ...]] = ()
    """Shapes of the gradients in it; empty if unknown: the bucket then counts as one vector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Median seconds of the phases of a step, for ranks that compute side by side on one host
    without communication.
    """

    ranks: int
    threads: int
    """Intra-op threads of each rank."""
    steps: int
    """Number of timed steps."""
    loading: float
    """Seconds to load a micro-batch in the rank's own process."""
    forward: float
    """Seconds of a micro-batch's forward."""
    backward: float
    """Seconds of a micro-batch's backward."""
    optimizer: float
    """Seconds of `Stepper.step`, which waits for no other rank here."""
    other: float
    """Seconds of the rest of a step."""
    spread: float
    """Standard deviation of a rank's step time, divided by the median step time. Deviations are
    from the mean of all ranks in the same step; for a single rank, from its median.
    """

    def cells(self) -> list[object]:
        """Return the cells of the table."""
        seconds = (self.loading, self.forward, self.backward, self.optimizer, self.other)
        shown = [f"{1e3 * part:.2f}" for part in seconds]
        return [self.ranks, self.threads, self.steps, *shown, percent(self.spread)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measurements of one task on one kind of host."""

    task: str
    device: str
    cores: int
    """Cores of the host on which it was measured."""
    global_batch: int
    micro_batch: int
    buckets: Sequence[GradientBucket]
    width: int
    """Bytes per element of a gradient; the largest if they differ."""
    buffers: int
    """Bytes of the buffers that ranks average after every step."""
    sides: Mapping[int, PhaseTimes]
    """Measurements by the number of ranks side by side."""
    messages: Mapping[int, float]
    """Seconds of the backend's all-reduce of a few numbers, by the number of ranks of this host:
    the time that software adds to a message. Empty for GPUs, whose network's latency includes it.
    """

    @property
    def slots(self) -> int:
        """The number of micro-batches of a step."""
        return -(-self.global_batch // self.micro_batch)

    def describe(self, per_host: int) -> str:
        """Describe the phases of a step for each number of ranks, and when gradients are complete.
        `per_host`: the number of ranks that share a host.
        """
        kind = "GPU" if self.device == "cuda" else counted(self.cores, "core")
        lines = [
            f"{self.task}, profiled here ({kind}), ms of a micro-batch (loading, forward, backward) and"
            " of a step (optimizer, other):",
            table(_HEAD, [side.cells() for side in self.sides.values()], left=[]),
        ]
        megabytes = self.width * sum(bucket.elements for bucket in self.buckets) / 1e6
        ready = ", ".join(f"{100 * bucket.ready:.0f} %" for bucket in self.buckets[:8])
        if len(self.buckets) > 8:
            ready += f" ... ({len(self.buckets)} in all)"
        lines.append(
            f"{megabytes:.2f} MB of gradients; buckets are complete after {ready} of the backward"
        )
        for ranks, seconds in self.messages.items():
            lines.append(f"a message takes {1e3 * seconds:.2f} ms among {ranks} ranks of one host")
        if self.device == "cpu":
            hosts = "every rank has its own host like this one"
            if per_host > 1:
                hosts = f"{per_host} ranks share one host of {self.cores} cores"
            lines.append(hosts)
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What one rank has measured."""

    device: str
    threads: int
    phases: Mapping[str, float]
    """Median seconds, by the names in PhaseTimes."""
    totals: Sequence[float]
    """Seconds of each step."""
    buckets: Sequence[GradientBucket]
    width: int
    buffers: int


def profile(
    source: Callable[[], Task],
    sides: Sequence[int],
    seconds: float,
    device: str = "auto",
    *,
    cores: int,
    talking: Sequence[int] = (),
) -> Profile:
    """Profile a task for about `seconds`, divided among the numbers of ranks in `sides`. Each
    number of ranks runs in new processes. Also time a message for each number in `talking`. `cores`:
    of this host.

    Raises WorkerFailed, and UsageError if a rank would have no micro-batch.
    """
    measured = {}
    for ranks in sorted(set(sides)):
        arguments = source, seconds / len(sides), device, ranks
        measured[ranks] = launch(_on_rank, workers=ranks, args=arguments)
    messages = {}
    for ranks in talking:
        turns = zip(*launch(_message, workers=ranks), strict=True)
        messages[ranks] = statistics.median(map(max, turns))
    task = source()
    *_, (rank, *_) = measured.values()
    return Profile(
        task=task.name or "task",
        device=rank.device,
        cores=cores,
        global_batch=task.global_batch,
        micro_batch=task.micro_batch,
        buckets=rank.buckets,
        width=rank.width,
        buffers=rank.buffers,
        sides={number: _side(of_ranks) for number, of_ranks in measured.items()},
        messages=messages,
    )


def _side(ranks: Sequence[_Measured]) -> PhaseTimes:
    """Return the median of each phase over the steps, averaged over the ranks."""
    phases = {}
    for name in ranks[0].phases:
        phases[name] = statistics.fmean(rank.phases[name] for rank in ranks)
    steps = min(len(rank.totals) for rank in ranks)
    totals = torch.tensor([rank.totals[:steps] for rank in ranks], dtype=torch.float64)
    return PhaseTimes(
        ranks=len(ranks),
        threads=ranks[0].threads,
        steps=steps,
        spread=spread_of(totals),
        **phases,
    )


def _message() -> list[float]:
    """Return the seconds of all-reduces as large as a step's facts, on this host's loopback."""
    with init(backend="gloo") as world:
        note = torch.zeros(facts_bytes(world.size) // 8, dtype=torch.float64)
        turns = []
        for _ in range(_WARM_UP + _MESSAGES):
            world.barrier()
            begin = perf_counter()
            dist.all_reduce(note)
            turns.append(perf_counter() - begin)
        return turns[_WARM_UP:]


def _on_rank(source: Callable[[], Task], seconds: float, device: str, ranks: int) -> _Measured:
    """Profile the task on one rank."""
    settings = Settings(
        task="task",
        device=device,  # type: ignore[arg-type]  # Settings checks it
        workers=ranks,
        sync_every=_NEVER if ranks > 1 else None,
    )
    with (
        trial(source(), settings, records=True) as training,
        recording(training.stepper) as times,
    ):
        windows = training.windows()
        micro_batches = steps = 0
        end = 0.0
        while not training.start_together(stop=steps >= _FEWEST and perf_counter() > end):
            window = next(windows)
            micro_batches = len(window)
            if not micro_batches:
                samples = training.task.global_batch
                raise UsageError("idle-rank-profiled", samples=samples, ranks=ranks)
            training.step(window)
            steps += 1
            if steps == _WARM_UP:
                times.clear()
                end = perf_counter() + seconds
        return _measured(training, times, micro_batches)


def _measured(training: Trial, times: Recording, micro_batches: int) -> _Measured:
    steps = [step.times for step in times.steps]
    # with nobody to wait for, the end of the sum is a part of Stepper.step
    ends = [step.optimizer + step.exposed for step in steps]
    medians = times.medians()
    parameters = training.stepper.reducer.parameters
    model = training.stepper.model
    return _Measured(
        device=training.world.device.type,
        threads=torch.get_num_threads(),
        phases={
            "loading": medians["data"] / micro_batches,
            "forward": medians["forward"] / micro_batches,
            "backward": medians["backward"] / micro_batches,
            "optimizer": statistics.median(ends),
            "other": medians["checks"] + medians["other"],
        },
        totals=[step.seconds for step in steps],
        buckets=_buckets(times),
        width=max(parameter.element_size() for parameter in parameters),
        buffers=sum(buffer.nbytes for buffer in model.buffers() if buffer.is_floating_point()),
    )


def _buckets(times: Recording) -> list[GradientBucket]:
    """Return the buckets with the median share of the last backward after which each one left. On a
    GPU, where this is unknown: the share of the elements up to its end.
    """
    members = times.parameters
    sizes = [sum(parameter.numel() for parameter in bucket) for bucket in members]
    shares = list(accumulate(size / sum(sizes) for size in sizes))
    if times.steps[-1].buckets:
        by_step = [_ready_shares(step) for step in times.steps]
        medians = [statistics.median(column) for column in zip(*by_step, strict=True)]
        shares = list(accumulate(medians, max))
    buckets = []
    for parameters, size, ready in zip(members, sizes, shares, strict=True):
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        buckets.append(GradientBucket(ready=min(1.0, ready), elements=size, tensors=shapes))
    return buckets


def _ready_shares(step: RecordedStep) -> list[float]:
    """Return the share of the last backward after which each bucket left."""
    *_, backward = [span for span in step.times.spans if span.phase == "backward"]
    seconds = backward.end - backward.begin
    return [max(0.0, (bucket.left - backward.begin) / seconds) for bucket in step.buckets]


def spread_of(seconds: Tensor) -> float:
    """Return the standard deviation of one rank's step, divided by the median step. `seconds` has
    shape [ranks, steps]. A delay that all ranks share in a step does not count: no rank waits.

    It is computed from the quartiles, which are 1.349 standard deviations apart, so that one
    interruption in a hundred steps has little effect.
    """
    ranks = len(seconds)
    usual = seconds.mean(0) if ranks > 1 else seconds.median()
    deviations = (seconds - usual).flatten()
    quartiles = torch.quantile(deviations, torch.tensor([0.25, 0.75], dtype=seconds.dtype))
    low, high = quartiles.tolist()
    unbiased = (ranks / (ranks - 1)) ** 0.5 if ranks > 1 else 1.0
    return float(unbiased * (high - low) / 1.349 / seconds.median().item())
