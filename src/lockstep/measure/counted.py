"""What one forward and backward of a model costs here: FLOPs counted by torch as they are dispatched, seconds by a clock.

The model is left as it was found: gradients, buffers (batch normalisation moves its statistics) and the random streams are put back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.errors import UsageError

_WARM_UP, _LEAST, _MOST = 2, 5, 50
_BUDGET = 2.0  # seconds of timed repetitions, once the least number is there


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Of one micro-batch on one device."""

    flops: int
    """Of matrix products, convolutions and attention: torch's FlopCounterMode has no others. 0: the model has none of them."""
    forward: float
    """Seconds, as `backward`: the median of some repetitions."""
    backward: float
    landed: tuple[float, ...] = ()
    """For each trained parameter, in the model's order: the share of the backward after which its gradient was complete. Empty: not measured."""

    @property
    def computation(self) -> float:
        return self.forward + self.backward

    @property
    def rate(self) -> float | None:
        """FLOP/s that this device achieves for this model; None where nothing was counted."""
        return self.flops / self.computation if self.flops else None


def counted(model: nn.Module, loss: Callable[[], Tensor]) -> Counted:
    """`loss` runs the forward of `model` on a batch of its own and gives one number to differentiate. Raises UsageError where it does not."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    with _as_found(model, device):
        for _ in range(_WARM_UP):
            _checked(loss()).backward()
        with FlopCounterMode(display=False) as counter:
            loss().backward()
        forward, backward = _timed(loss, device)
        landed = _landed(model, loss, device)
    return Counted(flops=int(counter.get_total_flops()), forward=forward, backward=backward, landed=landed)


def _checked(found: object) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UsageError(f"loss returned {what}: it must return one number to differentiate, such as output.sum()")
    if not found.requires_grad:
        raise UsageError("the loss does not depend on any parameter that is trained: there is no gradient to count or to send")
    return found


def _timed(loss: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    forwards: list[float] = []
    backwards: list[float] = []
    while len(forwards) < _LEAST or (len(forwards) < _MOST and sum(forwards) + sum(backwards) < _BUDGET):
        begin = _now(device)
        found = loss()
        middle = _now(device)
        found.backward()
        forwards.append(middle - begin)
        backwards.append(_now(device) - middle)
    return statistics.median(forwards), statistics.median(backwards)


def _landed(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> tuple[float, ...]:
    """In one more backward, which nobody times but for this. What never lands comes at the end."""
    trained = [each for each in model.parameters() if each.requires_grad]
    marks: dict[int, float] = {}

    def mark(number: int) -> None:
        marks[number] = _now(device)

    hooks = [each.register_post_accumulate_grad_hook(lambda _, number=number: mark(number)) for number, each in enumerate(trained)]
    try:
        found = loss()
        begin = _now(device)
        found.backward()
        end = _now(device)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple((marks.get(number, end) - begin) / (end - begin) for number in range(len(trained)))


def _now(device: torch.device) -> float:
    """After everything that was begun on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


@contextmanager
def _as_found(model: nn.Module, device: torch.device) -> Iterator[None]:
    gradients = [(each, each.grad) for each in model.parameters()]
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
