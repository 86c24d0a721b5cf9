"""What was measured of a task's ranks, before anybody simulates them: phases of a step, and when
each bucket of gradients is complete.

It is kept in a file, so that many plans need one measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from lockstep.errors import UsageError
from lockstep.gradients.layout import Entry, plan
from lockstep.tools.timing.output_files import reading, write_json
from lockstep.training.metrics import typed

FORMAT = "lockstep profile 1"
Figure = TypeVar("Figure")


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaves:
    """A bucket of gradients, and when it leaves."""

    ready: float
    """The share of the last micro-batch's backward after which the bucket is complete, 0 to 1."""
    elements: int
    tensors: Sequence[tuple[int, ...]] = ()
    """Shapes of the gradients in it; empty where nobody knows them: it then counts as one
    vector.
    """


def leaves(buckets: Sequence[Sequence[Tensor]], ready: Sequence[float] = ()) -> list[Leaves]:
    """Of buckets of parameters, in the order in which they leave; `ready`: when each is complete.

    Not measured, it is complete after as large a share of the backward as it, and those before it,
    have of the elements.
    """
    sizes = [sum(each.numel() for each in bucket) for bucket in buckets]
    shares = ready or [so_far / sum(sizes) for so_far in accumulate(sizes)]
    return [
        Leaves(ready=share, elements=size, tensors=tuple(tuple(each.shape) for each in bucket))
        for bucket, size, share in zip(buckets, sizes, shares, strict=True)
    ]


def laid_out(parameters: Sequence[Tensor], landed: Sequence[float] = ()) -> list[Leaves]:
    """As the Reducer lays them. `landed`: the share of the backward after which each one's gradient
    was there; buckets follow that order.

    Not measured, the backward is taken to reach the parameters from the last to the first.
    """
    entries = [
        Entry(str(number), each.numel(), each.dtype, each.device)
        for number, each in enumerate(parameters)
    ]
    backwards = range(len(entries))[::-1]
    order = sorted(backwards, key=landed.__getitem__) if landed else backwards
    members = [[span.parameter for span in bucket.spans] for bucket in plan(entries, order).buckets]
    ready = (
        list(
            accumulate((min(1.0, max(landed[number] for number in each)) for each in members), max)
        )
        if landed
        else []
    )
    return leaves([[parameters[number] for number in each] for each in members], ready)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Ranks that computed side by side on one host, without a word to each other. Seconds,
    medians.
    """

    ranks: int
    threads: int
    """Intra-op threads of each."""
    steps: int
    """That were timed."""
    forward: float
    """Of a micro-batch."""
    backward: float
    optimizer: float
    """`Stepper.step`, in which nobody is waited for."""
    other: float
    """The rest of a step."""
    loading: float
    """Of a micro-batch, by the rank itself."""
    spread: float
    """Standard deviation of a rank's step from that of its neighbours, or, alone, from its own
    others; over the median.
    """

    def describe(self) -> str:
        ranks = "1 rank alone" if self.ranks == 1 else f"{self.ranks} ranks side by side"
        each = (
            f"loading {1e3 * self.loading:.2f}, forward {1e3 * self.forward:.2f}, backward"
            f" {1e3 * self.backward:.2f} ms"
        )
        besides = (
            f"optimizer {1e3 * self.optimizer:.2f}, other {1e3 * self.other:.2f} ms; spread"
            f" {100 * self.spread:.1f} %"
        )
        threads = f"{self.threads} thread{'s' * (self.threads != 1)} each, {self.steps} steps"
        return f"{ranks}, {threads}: per micro-batch {each}; per step {besides}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Of one task on this kind of host."""

    task: str
    device: str
    cores: int
    """Of the host that it was measured on."""
    global_batch: int
    micro_batch: int
    buckets: Sequence[Leaves]
    width: int
    """Bytes of an element of a gradient."""
    buffers: int
    """Bytes that ranks average after every step."""
    weights: int
    """Bytes of the parameters."""
    states: int
    """Bytes that the optimizer keeps."""
    peak: float | None
    """Bytes by which a rank's memory grew at most, all of this included; None where the system
    does not say.
    """
    sides: Sequence[PhaseTimes]
    """By growing number of ranks."""
    flops: int = 0
    """Of a micro-batch's forward and backward, as torch counts them."""
    messages: Mapping[int, float]
    """Seconds of a sum of a few numbers by the backend, by the number of ranks of this host that
    make it: the software's part of a message.
    """

    def write(self, file: Path) -> None:
        """Raises UsageError where it cannot be written."""
        write_json(file, {"format": FORMAT} | asdict(self), "--save-profile")

    @classmethod
    def read(cls, file: Path) -> Profile:
        """Raises UsageError for what is no profile."""
        with reading(file, "--profile", "`lockstep plan TASK --save-profile FILE`") as found:
            if found.pop("format") != FORMAT or not found.keys() <= {e.name for e in fields(cls)}:
                raise ValueError
            made: Profile = typed(cls, found)
            return made

    def message(self, ranks: int) -> float:
        """The software's part of a message among that many ranks of one host. Raises UsageError
        where it was not measured.
        """
        if self.device == "cuda":  # the latency of a network of GPUs has it
            return 0.0
        return _measured(self.messages, ranks)

    def side(self, ranks: int) -> PhaseTimes:
        """The measurement with that many ranks side by side. Raises UsageError where there is
        none.
        """
        return _measured({each.ranks: each for each in self.sides}, ranks)

    def describe(self, per_host: int | None) -> str:
        """The phases of a step for each number of ranks side by side, and when gradients are
        complete; `per_host`: who shares the cores.
        """
        kind = "GPU" if self.device == "cuda" else f"{self.cores} core{'s' * (self.cores != 1)}"
        ready = ", ".join(f"{100 * bucket.ready:.0f} %" for bucket in self.buckets[:8])
        more = f" ... ({len(self.buckets)} in all)" if len(self.buckets) > 8 else ""
        size = self.width * sum(bucket.elements for bucket in self.buckets) / 1e6
        lines = [
            f"{self.task}, profiled here ({kind}):",
            *(f"  {side.describe()}" for side in self.sides),
        ]
        lines.append(
            f"  {size:.2f} MB of gradients; buckets are complete after {ready}{more} of the"
            " backward"
        )
        if self.messages:
            told = ", ".join(
                f"{1e3 * seconds:.2f} ms among {ranks} ranks"
                for ranks, seconds in sorted(self.messages.items())
            )
            lines.append(f"  a message takes {told} on one host, and at least that on a network")
        if self.device == "cpu":
            lines.append(f"  {self._shared(per_host)}")
        return "\n".join(lines)

    def _shared(self, per_host: int | None) -> str:
        if per_host is None:
            return (
                f"all ranks share these {self.cores} cores; more ranks than cores slow each other"
                " down in proportion"
            )
        if per_host == 1:
            return "every rank has its own host like this one"
        return f"{per_host} ranks share one host of {self.cores} cores"


def _measured(found: Mapping[int, Figure], ranks: int) -> Figure:
    if ranks not in found:
        known = ", ".join(map(str, sorted(found))) or "no"
        raise UsageError("profile-lacks-ranks", known=known, ranks=ranks)
    return found[ranks]
