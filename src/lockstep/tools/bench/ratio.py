"""The ratio of communication to computation in a data-parallel step of a model.

    ratio       seconds of communication / seconds of forward and backward, both of one optimizer
                step, as if nothing overlapped
    exposed     seconds of communication that do not overlap with the backward of the last
                micro-batch
    significant ratio > 0.1

The computation is measured, and with it the rate of this device. The communication is predicted
from sizes and a link (tools/plan/simulate.py). The optimizer's time, loading and waiting for slow
ranks are not included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.network import Link, Network
from lockstep.config import knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.plan.methods import method_of, work_of_module
from lockstep.tools.plan.networks import link_named
from lockstep.tools.plan.simulate import Predicted, simulate
from lockstep.tools.plan.work import RankWork
from lockstep.tools.timing.output_files import table
from lockstep.tools.timing.profiler import counted

COMPRESSIONS = ("--compress bf16", "--compress int8", "--compress powersgd:4")
SIGNIFICANT = 0.1
ACCUMULATIONS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """A step in which every rank computes `micro_batches` before gradients are sent once."""

    micro_batches: int
    bytes_per_step: float
    """Bytes that each rank sends in a step; independent of the number of micro-batches."""
    bytes_per_sample: float
    ratio: float
    exposed: float
    """Seconds of communication that do not overlap with computation."""
    step: float
    """Seconds of computation and exposed communication."""

    def cells(self) -> list[str]:
        sizes = [_bytes(self.bytes_per_step), _bytes(self.bytes_per_sample)]
        return [
            str(self.micro_batches),
            *sizes,
            f"{self.ratio:.3g}",
            _time(self.exposed),
            _time(self.step),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationRatio:
    """The result of `lockstep.communication_ratio` for one step. Times are in seconds.

    `describe()` gives the table, with a row for each number of micro-batches in `rows`.
    """

    model: str
    world_size: int
    network: str
    method: str
    samples: int
    """Samples of a micro-batch."""
    micro_batches: int
    """Micro-batches of each rank in a step."""
    parameters: int
    """Number of trained parameters."""
    gradient_bytes: int
    bytes_sent: float
    """Bytes that each rank sends in a step."""
    flops: int
    """FLOPs of a micro-batch's forward and backward; 0 if the model has none that torch counts."""
    device_rate: float | None
    """Measured FLOP/s of this device; None if `flops` is 0."""
    link_rate: float
    """Bytes per second, one way."""
    link_latency: float
    forward: float
    """Seconds of a micro-batch's forward."""
    backward: float
    """Seconds of a micro-batch's backward."""
    communication: float
    exposed: float
    rows: tuple[Accumulated, ...]
    advice: tuple[str, ...]

    @property
    def computation(self) -> float:
        """Seconds of computation in a step."""
        return self.micro_batches * (self.forward + self.backward)

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with the backward."""
        return self.communication - self.exposed

    @property
    def ratio(self) -> float:
        return self.communication / self.computation

    @property
    def significant(self) -> bool:
        return self.ratio > SIGNIFICANT

    def describe(self) -> str:
        """Return lines of text: sizes, rates, times, the verdict, a row for each number of
        micro-batches, and advice.
        """
        travels = f"of which {_time(self.hidden)} can overlap with the backward"
        return "\n".join(
            (
                self._sizes(),
                self._computation(),
                f"communication {_time(self.communication)} at {self._link()}, {travels}",
                (
                    f"communication / computation = {self.ratio:.3g}:"
                    f" {'' if self.significant else 'not '}significant (the limit is {SIGNIFICANT})"
                ),
                table(
                    ["micro-batches", "a step sends", "a sample", "ratio", "exposed", "a step"],
                    [row.cells() for row in self.rows],
                    left=(),
                ),
                *(f"- {sentence}" for sentence in self.advice),
            )
        )

    def _sizes(self) -> str:
        method = "" if self.method == "native" else f" with {self.method}"
        several = f"each of {self.world_size} ranks sends {_bytes(self.bytes_sent)} a step"
        sends = several if self.world_size > 1 else "one rank sends nothing"
        return (
            f"{self.model}: {self.parameters} parameters, {_bytes(self.gradient_bytes)} of"
            f" gradients; {sends}{method}"
        )

    def _computation(self) -> str:
        count, samples = self.micro_batches, f"{self.samples} sample{'s' * (self.samples != 1)}"
        many = samples if count == 1 else f"{count} micro-batches of {samples}"
        parts = (
            f"forward {_time(self.forward)}, backward {_time(self.backward)}{' each' * (count > 1)}"
        )
        whole = f"computation {_time(self.computation)} for {many} ({parts}); "
        if self.device_rate is None:
            return (
                whole
                + "no FLOPs counted, so no rate: the model has no matrix product, convolution or"
                " attention, and others are not counted"
            )
        flops = (
            f"{count * self.flops / 1e9:.4g} GFLOP in matrix products, convolutions and attention"
        )
        return f"{whole}{flops}: {self.device_rate / 1e9:.4g} GFLOP/s here"

    def _link(self) -> str:
        if math.isinf(self.link_rate):
            return "no limit"
        return f"{8e-6 * self.link_rate:g} Mbit/s and {1e6 * self.link_latency:g} us a message"

    def as_json(self) -> dict[str, Any]:
        more = {
            "computation": self.computation,
            "hidden": self.hidden,
            "ratio": self.ratio,
            "significant": self.significant,
        }
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
    """Return the ratio of communication to computation of `model`, on `world_size` ranks that each
    compute `batch` (one micro-batch) in a step.

    It runs some forwards and backwards here, on the model's device, in its current mode (train or
    eval) and with this process's threads. The model is restored.

    Example::

        report = lockstep.communication_ratio(model, x, world_size=8, network="25GbE")
        print(report.describe())

    Args:
        model: the model to train.
        batch: the arguments of the model: a tensor, a tuple or list of arguments, or a dict of
            keyword arguments.
        world_size: the number of ranks.
        network: as for `lockstep plan`: 1Gbit, 25GbE, free, or microseconds and a rate:
            "500,50Mbit".
        loss: a function from the output to one number. Default: the sum of the output's
            floating-point tensors.
        method: options as for `lockstep train`: "--compress bf16", "--sync-every 50".

    Returns:
        A CommunicationRatio; its `describe()` is a table.

    Raises:
        UsageError: invalid values, or a loss that depends on no parameter.
    """
    knob.whole("world_size", world_size)
    _link(network)  # before anything is measured
    chosen, samples = method_of(method), _samples(batch)
    total = loss or sum_of

    def forward() -> Tensor:
        if isinstance(batch, Mapping):
            return total(model(**batch))
        return total(model(*batch) if isinstance(batch, (tuple, list)) else model(batch))

    work_of_module(model)  # raises for a model without gradients, before anything is measured
    found = counted(model, forward)
    work = replace(
        work_of_module(model, landed=found.landed), forward=found.forward, backward=found.backward
    )
    return ratio_of(
        type(model).__name__,
        work,
        found.flops,
        samples=samples,
        world_size=world_size,
        network=network,
        method=chosen,
        told=method,
    )


def ratio_of(
    model: str,
    work: RankWork,
    flops: int,
    *,
    samples: int,
    world_size: int,
    network: str | Link,
    method: Parallelism,
    told: str = "native",
) -> CommunicationRatio:
    """Return the ratio for the work of a rank in a step. `flops`: FLOPs of a micro-batch; `told`:
    the method as the user wrote it.
    """
    link = _link(network)

    def step(micro_batches: int, method: Parallelism = method) -> Predicted:
        one = replace(work, micro_batches=micro_batches)
        return simulate(one, world_size, Network.flat(link.latency, link.bandwidth), method)

    once = step(work.micro_batches)
    compressed = {
        name: step(work.micro_batches, method_of(name)).communication / work.computation
        for name in COMPRESSIONS
    }
    return CommunicationRatio(
        model=model,
        world_size=world_size,
        network=(
            network
            if isinstance(network, str)
            else f"{1e6 * link.latency:g},{8e-6 * link.bandwidth:g}Mbit"
        ),
        method=told,
        samples=samples,
        micro_batches=work.micro_batches,
        parameters=work.elements,
        gradient_bytes=round(work.bytes),
        bytes_sent=once.sent,
        flops=flops,
        device_rate=flops / (work.forward + work.backward) if flops else None,
        link_rate=link.bandwidth,
        link_latency=link.latency,
        forward=work.forward,
        backward=work.backward,
        communication=once.communication,
        exposed=once.exposed,
        rows=tuple(_row(step(count), count, samples) for count in ACCUMULATIONS),
        advice=_advice(
            once.communication / work.computation,
            compressed,
            samples,
            work.micro_batches,
            world_size,
            method,
        ),
    )


def _row(found: Predicted, micro_batches: int, samples: int) -> Accumulated:
    return Accumulated(
        micro_batches=micro_batches,
        bytes_per_step=found.sent,
        bytes_per_sample=found.sent / (micro_batches * samples),
        ratio=found.communication / found.computation,
        exposed=found.exposed,
        step=found.step,
    )


def _advice(
    now: float,
    compressed: Mapping[str, float],
    samples: int,
    micro_batches: int,
    world_size: int,
    method: Parallelism,
) -> tuple[str, ...]:
    """Return advice, one sentence each with the ratio that it would give. The advice that changes
    the training least comes first. `compressed`: the ratio with each of COMPRESSIONS.
    """
    if now <= SIGNIFICANT:
        return (_enough(now, world_size),)
    times = math.ceil(now / SIGNIFICANT)
    doubled = 2 ** math.ceil(math.log2(now / SIGNIFICANT))
    found = [
        (
            f"micro-batches of {times * samples} samples in place of {samples}, where they fit and"
            f" train as well: about {now / times:.2g}"
        ),
        (
            f"accumulate {doubled * micro_batches} micro-batches of {samples}:"
            f" {now / doubled:.2g}; each step sends as much, but there are fewer steps"
        ),
    ]
    if method.compression is None and method.local is None and not method.server:
        found += [
            f"{name}: {ratio:.2g}, if compressing costs nothing"
            for name, ratio in compressed.items()
            if ratio < now
        ]
        found.append(
            f"--sync-every {times}: {now / times:.2g}; replicas differ between synchronizations,"
            " which changes the training"
        )
    return tuple(found)


def _enough(now: float, world_size: int) -> str:
    if world_size == 1:
        return "one rank sends nothing: there is nothing to do"
    if now == 0:
        return "communication is free: there is nothing to do"
    room = SIGNIFICANT / now
    return (
        "communication is not significant: there is nothing to do (it becomes significant on a"
        f" link {room:.3g} times slower)"
    )


def sum_of(output: Any) -> Tensor:
    """Return the sum of all floating-point tensors in an output. Raises UsageError if there are
    none.
    """
    if isinstance(output, Tensor):
        found = [output] if output.is_floating_point() else []
    elif isinstance(output, Mapping):
        found = [sum_of(value) for value in output.values() if not _empty(value)]
    elif isinstance(output, (tuple, list)):
        found = [sum_of(value) for value in output if not _empty(value)]
    else:
        found = []
    if not found:
        raise UsageError("output-without-tensor", kind=type(output).__name__)
    return torch.stack([each.float().sum() for each in found]).sum()


def _empty(value: Any) -> bool:
    """Whether the default loss ignores a value, such as a number, None, or a tensor of indices."""
    return not isinstance(value, (Tensor, Mapping, tuple, list)) or (
        isinstance(value, Tensor) and not value.is_floating_point()
    )


def _link(network: object) -> Link:
    if isinstance(network, Link):
        return network
    if isinstance(network, str):
        return link_named(network)
    expected = "a name or rate such as '25GbE' or '500,50Mbit', or a Link"
    raise UsageError("wrong-type", name="network", value=network, expected=expected)


def _samples(batch: Any) -> int:
    """Return the length of the first tensor's first dim, which is taken as the batch."""
    tensors = (
        list(batch.values())
        if isinstance(batch, Mapping)
        else list(batch)
        if isinstance(batch, (tuple, list))
        else [batch]
    )
    first = next((each for each in tensors if isinstance(each, Tensor)), None)
    if first is None or not first.dim() or not len(first):
        raise UsageError("batch-without-tensor", kind=type(batch).__name__)
    return len(first)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
