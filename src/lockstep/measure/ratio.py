"""Communication to computation: what a data-parallel step of this model would spend on sending, against what it spends on computing.

    ratio       seconds of communication / seconds of forward and backward, both of one optimizer step, as if nothing overlapped
    exposed     what of the communication is left when buckets travel behind the backward of the last micro-batch
    significant ratio > 0.1

Measured are the computation and, with it, the rate of this device; foretold is the communication, from sizes and a link (plan/simulation/simulate.py).
Not in it: the optimizer's own time, loading, waiting for slow ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.network import Link, Network
from lockstep.data.windows import whole
from lockstep.errors import UsageError
from lockstep.measure import ratio_text
from lockstep.measure.advice import COMPRESSIONS, advice
from lockstep.measure.counted import Counted, counted
from lockstep.method import Method
from lockstep.plan.links.networks import network as network_of
from lockstep.plan.methods.cost import Gradients
from lockstep.plan.methods.gradients import gradients_of
from lockstep.plan.methods.names import method_of
from lockstep.plan.simulation.simulate import Predicted, simulate
from lockstep.plan.simulation.work import Leaves, Work

SIGNIFICANT = 0.1
ACCUMULATIONS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """A step in which every rank computes so many micro-batches before gradients are sent once."""

    micro_batches: int
    bytes_per_step: float
    """That each rank sends: the same however many micro-batches there are."""
    bytes_per_sample: float
    ratio: float
    exposed: float
    """Seconds of communication that nothing hides."""
    step: float
    """Seconds: computation and exposed communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationRatio:
    """Of one step; `rows` say it for other numbers of micro-batches. Times in seconds."""

    model: str
    world_size: int
    network: str
    method: str
    samples: int
    """Of a micro-batch."""
    micro_batches: int
    """Of each rank in a step."""
    parameters: int
    """That are trained."""
    gradient_bytes: int
    bytes_sent: float
    """By each rank, in a step."""
    flops: int
    """Of forward and backward of a micro-batch; 0 where the model has none that torch counts."""
    device_rate: float | None
    """FLOP/s, measured."""
    link_rate: float
    """Bytes per second, one way."""
    link_latency: float
    forward: float
    """Of a micro-batch."""
    backward: float
    """Of a micro-batch."""
    communication: float
    exposed: float
    rows: tuple[Accumulated, ...]
    advice: tuple[str, ...]

    @property
    def computation(self) -> float:
        """Of a step."""
        return self.micro_batches * (self.forward + self.backward)

    @property
    def hidden(self) -> float:
        """What of the communication travels behind the backward."""
        return self.communication - self.exposed

    @property
    def ratio(self) -> float:
        return self.communication / self.computation

    @property
    def significant(self) -> bool:
        return self.ratio > SIGNIFICANT

    def describe(self) -> str:
        """Some lines of text: sizes, rates, times, the verdict, a row for each accumulation, advice."""
        return ratio_text.describe(self)

    def as_json(self) -> dict[str, Any]:
        more = {"computation": self.computation, "hidden": self.hidden, "ratio": self.ratio, "significant": self.significant}
        link_rate = self.link_rate if self.link_rate < float("inf") else "inf"
        return {**asdict(self), **more, "link_rate": link_rate}


def communication_ratio(
    model: nn.Module,
    batch: Any,
    world_size: int,
    *,
    network: str | Link = "1Gbit",
    loss: Callable[[Any], Tensor] | None = None,
    method: str = "native",
) -> CommunicationRatio:
    """Communication to computation of `model`, trained by `world_size` ranks that each compute `batch` (one micro-batch) in a step.

    Runs some forwards and backwards here, on the model's device, in its mode and with this process's threads, and leaves the model as it was.

    Args:
        model: what is trained.
        batch: what the model is called with: a tensor, a tuple or list of its arguments, or a dict of keyword arguments.
        world_size: how many ranks there would be.
        network: as for `lockstep plan`: 1Gbit, 25GbE, free, or microseconds and a rate: "500,50Mbit".
        loss: makes one number of the output; default: the sum of its floating-point tensors.
        method: as for `lockstep train`: "--compress bf16", "--sync-every 50".

    Raises:
        UsageError: values that cannot work, or a loss that depends on no parameter.
    """
    whole("world_size", world_size)
    _link(network)  # before anything is measured
    chosen, samples = method_of(method), _samples(batch)
    total = loss or sum_of

    def forward() -> Tensor:
        if isinstance(batch, Mapping):
            return total(model(**batch))
        return total(model(*batch) if isinstance(batch, (tuple, list)) else model(batch))

    gradients = gradients_of(model)
    return ratio_of(
        type(model).__name__,
        counted(model, forward),
        gradients,
        samples=samples,
        world_size=world_size,
        network=network,
        method=chosen,
        told=method,
    )


def ratio_of(
    model: str,
    work: Counted,
    gradients: Gradients,
    *,
    samples: int,
    world_size: int,
    network: str | Link,
    method: Method,
    told: str = "native",
    micro_batches: int = 1,
) -> CommunicationRatio:
    """The same from what was counted already. `told` is how the user wrote the method."""
    link = _link(network)
    rows = tuple(_row(count, work, gradients, link, samples, world_size, method) for count in ACCUMULATIONS)
    once = _step(micro_batches, work, gradients, link, world_size, method)
    computation = micro_batches * work.computation
    compressed = {name: _step(micro_batches, work, gradients, link, world_size, method_of(name)).communication for name in COMPRESSIONS}
    return CommunicationRatio(
        model=model,
        world_size=world_size,
        network=network if isinstance(network, str) else f"{1e6 * link.latency:g},{8e-6 * link.bandwidth:g}Mbit",
        method=told,
        samples=samples,
        micro_batches=micro_batches,
        parameters=gradients.elements,
        gradient_bytes=round(gradients.bytes),
        bytes_sent=once.sent,
        flops=work.flops,
        device_rate=work.rate,
        link_rate=link.bandwidth,
        link_latency=link.latency,
        forward=work.forward,
        backward=work.backward,
        communication=once.communication,
        exposed=once.exposed,
        rows=rows,
        advice=advice(
            once.communication / computation,
            {name: seconds / computation for name, seconds in compressed.items()},
            samples=samples,
            micro_batches=micro_batches,
            world_size=world_size,
            method=method,
            limit=SIGNIFICANT,
        ),
    )


def sum_of(output: Any) -> Tensor:
    """The sum of all floating-point tensors in an output. Raises UsageError where there is none."""
    if isinstance(output, Tensor):
        found = [output] if output.is_floating_point() else []
    elif isinstance(output, Mapping):
        found = [sum_of(value) for value in output.values() if not _empty(value)]
    elif isinstance(output, (tuple, list)):
        found = [sum_of(value) for value in output if not _empty(value)]
    else:
        found = []
    if not found:
        raise UsageError(
            f"the model returned a {type(output).__name__} without a floating-point tensor: give loss=, a function from it to one number"
        )
    return torch.stack([each.float().sum() for each in found]).sum()


def _empty(value: Any) -> bool:
    """What a default loss passes over beside tensors: a number, None, indices."""
    return not isinstance(value, (Tensor, Mapping, tuple, list)) or (isinstance(value, Tensor) and not value.is_floating_point())


def _link(network: object) -> Link:
    if isinstance(network, Link):
        return network
    if isinstance(network, str):
        return network_of(network)
    raise UsageError(f"network={network!r} is a {type(network).__name__}: give a name or rate such as '25GbE' or '500,50Mbit', or a Link")


def _step(micro_batches: int, work: Counted, gradients: Gradients, link: Link, world_size: int, method: Method) -> Predicted:
    one = Work(
        forward=work.forward,
        backward=work.backward,
        micro_batches=micro_batches,
        buckets=_leaves(gradients, work.landed),
        width=gradients.width,
    )
    return simulate(one, world_size, Network.flat(link.latency, link.bandwidth), method)


def _leaves(gradients: Gradients, landed: Sequence[float]) -> tuple[Leaves, ...]:
    """Buckets, each ready when the last of its gradients has landed; they hold the parameters from the last to the first."""
    if not landed:
        return gradients.leaves()
    found, waiting, ready = [], list(landed), 0.0
    for bucket in gradients.leaves():
        ready = max(ready, *(waiting.pop() for _ in bucket.tensors))
        found.append(replace(bucket, ready=ready))
    return tuple(found)


def _row(count: int, work: Counted, gradients: Gradients, link: Link, samples: int, world_size: int, method: Method) -> Accumulated:
    found = _step(count, work, gradients, link, world_size, method)
    return Accumulated(
        micro_batches=count,
        bytes_per_step=found.sent,
        bytes_per_sample=found.sent / (count * samples),
        ratio=found.communication / (count * work.computation),
        exposed=found.exposed,
        step=found.step,
    )


def _samples(batch: Any) -> int:
    """The length of the first tensor's first axis: what every model here takes for its batch."""
    tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, (tuple, list)) else [batch]
    first = next((each for each in tensors if isinstance(each, Tensor)), None)
    if first is None or not first.dim() or not len(first):
        raise UsageError(f"batch is a {type(batch).__name__} without a tensor of at least one sample: give what the model is called with")
    return len(first)
