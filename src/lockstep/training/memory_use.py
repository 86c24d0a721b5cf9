"""What a rank's memory is used for while it trains: parameters, gradients, the optimizer's
state, and what a forward keeps for its backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.runtime import randomness
from lockstep.step.stepper import Stepper

T = TypeVar("T")


class Activations:
    """Counts, once, the bytes that the forward of one micro-batch keeps for its backward: storages,
    each once, without the model's own.

    Not `counts`: of a compiled model, whose graph would be another one with somebody looking on.
    """

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts
        self.bytes: int | None = None
        """None where they have not been counted."""

    def watch(self, model: torch.nn.Module, forward: Callable[[], T]) -> T:
        """What `forward`, one micro-batch's with its loss, gives. Nothing is watched after the
        first time.

        Some forwards cannot be watched (torch.func refuses): they are computed once more from where
        they began, and nothing is known of them.
        """
        if not self._counts:
            return forward()
        self._counts = False
        own = {
            tensor.untyped_storage().data_ptr()
            for tensor in [*model.parameters(), *model.buffers()]
            if tensor.layout is torch.strided
        }
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # itself would be a cycle where it is an output

        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        back = randomness.kept(devices=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                found = forward()
        except RuntimeError as error:
            if "saved tensor" not in str(error):
                raise
        else:
            self.bytes = sum(size for place, size in kept.items() if place not in own)
            return found
        back()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return forward()


def memory_use(stepper: Stepper, activations: int | None) -> dict[str, int | None]:
    """Bytes on this rank: of a sharded optimizer its share. `peak`: the most that the process,
    or its GPU, has held so far.
    """
    states = [value for state in stepper.optimizer.state.values() for value in _tensors(state)]
    return {
        "parameters": sum(each.nbytes for each in stepper.model.parameters()),
        "gradients": sum(bucket.sum.nbytes for bucket in stepper.reducer.buckets),
        "optimizer": sum(each.nbytes for each in states),
        "activations": activations,
        "peak": _peak(stepper.world.device),
    }


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return None
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        return next(
            (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None
        )
