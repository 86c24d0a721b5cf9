"""The ratio of communication to computation in a data-parallel step of a model.

    ratio       seconds of communication / seconds of forward and backward, both of one optimizer
                step, as if nothing overlapped
    exposed     seconds of communication that no overlap with the backward can hide
    significant ratio > 0.1

The computation is measured, and with it the rate of this device. The communication is that of a
ring all-reduce over a link. The optimizer's time, loading and waiting for slow ranks are not
included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.collectives import Link
from lockstep.errors import UsageError
from lockstep.tools.plan.networks import link_named
from lockstep.tools.timing.output_files import megabytes, milliseconds

SIGNIFICANT = 0.1
_REPEATS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationRatio:
    """The result of `lockstep.communication_ratio` for one step. Times are in seconds."""

    model: str
    world_size: int
    samples: int
    """Samples that each rank computes in a step."""
    parameters: int
    """Number of trained parameters."""
    gradient_bytes: int
    flops: int
    """FLOPs of a forward and backward; 0 if the model has none that torch counts."""
    forward: float
    backward: float
    link_rate: float
    """Bytes per second, one way."""
    link_latency: float

    @property
    def bytes_sent(self) -> float:
        """Bytes that each rank sends in a step."""
        return 2 * (self.world_size - 1) / self.world_size * self.gradient_bytes

    @property
    def communication(self) -> float:
        messages = 2 * (self.world_size - 1)
        return messages * self.link_latency + self.bytes_sent / self.link_rate

    @property
    def computation(self) -> float:
        return self.forward + self.backward

    @property
    def exposed(self) -> float:
        """Seconds of communication that remain if the backward hides as much as it lasts."""
        return max(0.0, self.communication - self.backward)

    @property
    def device_rate(self) -> float | None:
        """Measured FLOP/s of this device; None if `flops` is 0."""
        return self.flops / self.computation if self.flops else None

    @property
    def ratio(self) -> float:
        return self.communication / self.computation

    @property
    def significant(self) -> bool:
        return self.ratio > SIGNIFICANT

    def describe(self) -> str:
        """Return lines of text: sizes, times, the verdict, and what a larger batch would give."""
        rate = "" if self.device_rate is None else f", {self.device_rate / 1e9:.4g} GFLOP/s here"
        lines = [
            f"{self.model}: {self.parameters} parameters, {megabytes(self.gradient_bytes)} of"
            f" gradients; each of {self.world_size} ranks sends {megabytes(self.bytes_sent)} a step",
            f"computation {milliseconds(self.computation)} for {self.samples} samples (forward"
            f" {milliseconds(self.forward)}, backward {milliseconds(self.backward)}){rate}",
            f"communication {milliseconds(self.communication)}, of which at least {milliseconds(self.exposed)}"
            " are exposed",
            f"communication / computation = {self.ratio:.3g}:"
            f" {'' if self.significant else 'not '}significant (the limit is {SIGNIFICANT})",
        ]
        if self.significant:
            times = math.ceil(self.ratio / SIGNIFICANT)
            lines.append(
                f"with {times} times the samples a step, in larger micro-batches or several of them,"
                f" it is {self.ratio / times:.2g}: a step sends the same bytes"
            )
        return "\n".join(lines)


def communication_ratio(
    model: nn.Module,
    batch: Any,
    world_size: int,
    *,
    network: str | Link = "1Gbit",
    loss: Callable[[Any], Tensor] | None = None,
) -> CommunicationRatio:
    """Return the ratio of communication to computation of `model`, on `world_size` ranks that each
    compute `batch` in a step.

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

    Returns:
        A CommunicationRatio; its `describe()` is a text.

    Raises:
        UsageError: invalid values, or a loss that depends on no parameter.
    """
    if type(world_size) is not int or world_size < 1:
        expected = "a whole number of at least 1"
        raise UsageError("wrong-value", name="world_size", value=world_size, expected=expected)
    link = _link(network)
    samples = _samples(batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("no-trainable-parameter")
    total = loss or sum_of

    def forward() -> Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, tuple | list):
            output = model(*batch)
        else:
            output = model(batch)
        return checked(total(output))

    seconds, flops = _timed(model, forward, trained[0].device)
    return CommunicationRatio(
        model=type(model).__name__,
        world_size=world_size,
        samples=samples,
        parameters=sum(parameter.numel() for parameter in trained),
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        flops=flops,
        forward=seconds[0],
        backward=seconds[1],
        link_rate=link.bandwidth,
        link_latency=link.latency,
    )


def _timed(
    model: nn.Module, forward: Callable[[], Tensor], device: torch.device
) -> tuple[tuple[float, float], int]:
    """Return the median seconds of the forward and the backward, and the FLOPs of both."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter()

    forwards, backwards = [], []
    with _restored(model, device):
        forward().backward()  # warm-up
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            forward().backward()
        for _ in range(_REPEATS):
            begin = now()
            output = forward()
            middle = now()
            output.backward()
            backwards.append(now() - middle)
            forwards.append(middle - begin)
    return (median(forwards), median(backwards)), int(counter.get_total_flops())


@contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the gradients, buffers and random streams after the block."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def checked(loss: object) -> Tensor:
    """Return the loss. Raises UsageError if it cannot be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UsageError("loss-not-a-number", what=f"a {type(loss).__name__}{shape}")
    if not loss.requires_grad:
        raise UsageError("loss-without-parameters")
    return loss


def sum_of(output: Any) -> Tensor:
    """Return the sum of all floating-point tensors in an output. Raises UsageError if there are
    none.
    """
    tensors = list(_floats(output))
    if not tensors:
        raise UsageError("output-without-tensor", kind=type(output).__name__)
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        yield from _floats(list(output.values()))
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _floats(part)


def _link(network: object) -> Link:
    if isinstance(network, Link):
        return network
    if isinstance(network, str):
        return link_named(network)
    expected = "a name or rate such as '25GbE' or '500,50Mbit', or a Link"
    raise UsageError("wrong-value", name="network", value=network, expected=expected)


def _samples(batch: Any) -> int:
    """Return the length of the first tensor's first dim, which is taken as the batch."""
    parts = [batch]
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, tuple | list):
        parts = list(batch)
    first = next((part for part in parts if isinstance(part, Tensor)), None)
    if first is None or not first.dim() or not len(first):
        raise UsageError("batch-without-tensors", kind=type(batch).__name__)
    return len(first)
