"""The profile of a task: the measured phases of a step, and when each bucket of gradients is
complete. `lockstep plan` simulates steps from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.data.windows import counted
from lockstep.gradients.layout import Entry, plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaves:
    """A bucket of gradients, and when it is ready to send."""

    ready: float
    """The share of the last micro-batch's backward after which the bucket is complete, 0 to 1."""
    elements: int
    tensors: Sequence[tuple[int, ...]] = ()
    """Shapes of the gradients in it; empty if unknown: the bucket then counts as one vector."""


def laid_out(parameters: Sequence[Tensor], ready_shares: Sequence[float]) -> list[Leaves]:
    """Return the parameters in buckets, as the Reducer makes them. `ready_shares`: for each
    parameter, the share of the backward after which its gradient was complete; buckets follow this
    order.
    """
    entries = [
        Entry(str(number), parameter.numel(), parameter.dtype, parameter.device)
        for number, parameter in enumerate(parameters)
    ]
    order = sorted(range(len(entries))[::-1], key=ready_shares.__getitem__)
    leaves = []
    ready = 0.0
    for bucket in plan(entries, order).buckets:
        numbers = [span.parameter for span in bucket.spans]
        ready = max(ready, min(1.0, max(ready_shares[number] for number in numbers)))
        members = [parameters[number] for number in numbers]
        shapes = tuple(tuple(parameter.shape) for parameter in members)
        elements = sum(parameter.numel() for parameter in members)
        leaves.append(Leaves(ready=ready, elements=elements, tensors=shapes))
    return leaves


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
    forward: float
    """Seconds of a micro-batch's forward."""
    backward: float
    """Seconds of a micro-batch's backward."""
    optimizer: float
    """Seconds of `Stepper.step`, which waits for no other rank here."""
    other: float
    """Seconds of the rest of a step."""
    loading: float
    """Seconds to load a micro-batch in the rank's own process."""
    spread: float
    """Standard deviation of a rank's step time, divided by the median step time. Deviations are
    from the mean of all ranks in the same step; for a single rank, from its median.
    """

    def describe(self) -> str:
        ranks = "1 rank alone" if self.ranks == 1 else f"{self.ranks} ranks side by side"
        threads = f"{counted(self.threads, 'thread')} each, {self.steps} steps"
        loading = f"loading {1e3 * self.loading:.2f}"
        forward = f"forward {1e3 * self.forward:.2f}"
        backward = f"backward {1e3 * self.backward:.2f} ms"
        optimizer = f"optimizer {1e3 * self.optimizer:.2f}"
        other = f"other {1e3 * self.other:.2f} ms"
        spread = f"spread {100 * self.spread:.1f} %"
        return (
            f"{ranks}, {threads}: per micro-batch {loading}, {forward}, {backward}; per step"
            f" {optimizer}, {other}; {spread}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measurements of one task on one kind of host."""

    task: str
    device: str
    cores: int
    """Cores of the host on which it was measured."""
    global_batch: int
    micro_batch: int
    buckets: Sequence[Leaves]
    width: int
    """Bytes per element of a gradient; the largest if they differ."""
    buffers: int
    """Bytes of the buffers that ranks average after every step."""
    sides: Sequence[PhaseTimes]
    """Measurements in order of the number of ranks."""
    messages: Mapping[int, float]
    """Seconds of the backend's all-reduce of a few numbers, by the number of ranks of this host:
    the time that software adds to a message.
    """

    def message(self, ranks: int) -> float:
        """Return the seconds that software adds to a message among `ranks` ranks of one host."""
        if self.device == "cuda":  # the latency of a network of GPUs includes it
            return 0.0
        return self.messages[ranks]

    def side(self, ranks: int) -> PhaseTimes:
        """Return the measurement with `ranks` ranks side by side."""
        by_ranks = {side.ranks: side for side in self.sides}
        return by_ranks[ranks]

    def describe(self, per_host: int) -> str:
        """Describe the phases of a step for each number of ranks, and when gradients are complete.
        `per_host`: the number of ranks that share a host.
        """
        kind = "GPU" if self.device == "cuda" else counted(self.cores, "core")
        lines = [f"{self.task}, profiled here ({kind}):"]
        lines += [f"  {side.describe()}" for side in self.sides]
        elements = sum(bucket.elements for bucket in self.buckets)
        megabytes = self.width * elements / 1e6
        ready = ", ".join(f"{100 * bucket.ready:.0f} %" for bucket in self.buckets[:8])
        if len(self.buckets) > 8:
            ready += f" ... ({len(self.buckets)} in all)"
        lines.append(
            f"  {megabytes:.2f} MB of gradients; buckets are complete after {ready} of the backward"
        )
        if self.messages:
            times = []
            for ranks, seconds in sorted(self.messages.items()):
                times.append(f"{1e3 * seconds:.2f} ms among {ranks} ranks")
            listed = ", ".join(times)
            lines.append(f"  a message takes {listed} on one host, and at least that on a network")
        if self.device == "cpu":
            hosts = "every rank has its own host like this one"
            if per_host > 1:
                hosts = f"{per_host} ranks share one host of {self.cores} cores"
            lines.append(f"  {hosts}")
        return "\n".join(lines)
