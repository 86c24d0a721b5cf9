"""Buffers that a forward moves (BatchNorm statistics): one update a step, whatever the number of ranks and micro-batches.

Every micro-batch of a step starts from the same value, the step's; when all are done a buffer moves by the weighted mean of what
the micro-batches made of it. Without this, statistics would depend on how many micro-batches a rank happened to own, and differ
between ranks. Integer buffers (`num_batches_tracked`) move by the same mean, rounded: they count steps.

Which buffers move is found out, not declared: after the first step the ranks agree on those that any forward has changed; those of
BatchNorm's family always belong to them. One that begins to move later is seen by the rank concerned (its version counter changes)
and announced with the facts of that step; it is taken from rank 0 that once. A buffer that changes its shape is a cache, and left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.collectives.group import Group


class MovingBuffers:
    """The buffers of one model during training. `begin` opens a step, `open` and `shut` enclose a micro-batch, `finish` is collective."""

    def __init__(self, model: nn.Module, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        # By owner and name: a forward may also assign a new tensor to a buffer.
        self._owners = [(module, name) for module in model.modules() for name, buffer in module._buffers.items() if buffer is not None]
        # Batch norm kernels write their statistics without touching the version counter, so these are never waited for to show up.
        self._always = {number for number, (module, _) in enumerate(self._owners) if isinstance(module, _NormBase)}
        self._moving: list[int] = list(range(len(self._owners)))
        self._agreed = False
        self._shapes = [self._buffer(number).shape for number in self._moving]
        self._start: list[Tensor] = []
        self._moved = torch.zeros(0)
        self._touched = torch.zeros(0)
        self._seen: list[tuple[int, int]] = []

    def _buffer(self, number: int) -> Tensor:
        module, name = self._owners[number]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _resized(self, number: int) -> bool:
        return self._buffer(number).shape != self._shapes[number]

    def named(self) -> Sequence[tuple[str, Tensor]]:
        """The buffers that move, equal on all ranks between steps."""
        return [
            (f"buffer {name} of {type(module).__name__}", self._buffer(n))
            for n, (module, name) in enumerate(self._owners)
            if n in self._moving
        ]

    def begin(self) -> None:
        """A new step: keep the values that every micro-batch starts from."""
        self._start = [self._buffer(number).detach().clone() for number in self._moving]
        wide = torch.float64 if any(start.dtype in (torch.float64, torch.complex128) for start in self._start) else torch.float32
        self._moved = torch.zeros(sum(_real(start).numel() for start in self._start), dtype=wide, device=self._device)
        self._touched = torch.zeros(len(self._owners), dtype=torch.int64)
        self._seen = self._marks()

    @torch.no_grad()
    def open(self) -> None:
        """A micro-batch begins: it finds the step's starting values."""
        for number, start in zip(self._moving, self._start, strict=True):
            if not self._resized(number):
                self._buffer(number).copy_(start)
        self._seen = self._marks()

    @torch.no_grad()
    def shut(self, weight: float | Tensor) -> None:
        """A micro-batch of that weight is over."""
        for piece, number, start in zip(self._pieces(), self._moving, self._start, strict=True):
            if self._resized(number):
                continue
            movement = _movement(self._buffer(number), start).to(piece)
            piece.add_(movement * weight)
            if not self._agreed and movement.any():
                self._touched[number] = 1
        self._look()

    def _look(self) -> None:
        """Note which buffers this micro-batch has written to so far."""
        for number, (before, after) in enumerate(zip(self._seen, self._marks(), strict=True)):
            if before != after and not self._resized(number):
                self._touched[number] = 1

    def _marks(self) -> list[tuple[int, int]]:
        """What changes when a buffer is written to: the tensor itself, or its version."""
        return [(id(buffer), buffer._version) for buffer in map(self._buffer, range(len(self._owners)))]

    def _pieces(self) -> Sequence[Tensor]:
        return self._moved.split([_real(start).numel() for start in self._start]) if self._start else ()

    @property
    def newly_moving(self) -> bool:
        """Whether a forward of this rank, also of the micro-batch that is open, has written to a buffer that was agreed not to move."""
        if not self._agreed:
            return False
        self._look()
        return any(self._touched[number] for number in set(range(len(self._owners))) - set(self._moving))

    @torch.no_grad()
    def finish(self, weight: float, newly_moving: bool) -> None:
        """End the step on all ranks: move by the sum over ranks divided by `weight`; by nothing where that is 0."""
        if self._moving:
            self._group.all_reduce(self._moved, place="for buffers").wait()
            self._moved.mul_(1 / weight if weight > 0 else 0.0)
        for piece, number, start in zip(self._pieces(), self._moving, self._start, strict=True):
            if not self._resized(number):
                self._buffer(number).copy_(_after(start, piece))
        self._start = []
        if newly_moving or not self._agreed:
            self._agree(take_from_first=newly_moving)

    def _agree(self, take_from_first: bool) -> None:
        """Settle which buffers move: those that any rank's forward has written to so far."""
        known = set(self._moving) if self._agreed else set()
        if self._owners:
            touched = self._touched.to(self._device)
            self._group.all_reduce(touched, "max", place="for the list of moving buffers").wait()
            moving = known | self._always | set(touched.nonzero().flatten().tolist())
            for number in sorted(moving - known) if take_from_first else ():
                self._group.broadcast(self._buffer(number), place="for a buffer that began to move").wait()
            self._moving = sorted(moving)
        self._agreed = True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _movement(buffer: Tensor, start: Tensor) -> Tensor:
    """How far a buffer has moved, flat. Subtracted in its own dtype: a large counter that moves by 1 moves by 1; inf minus inf is no movement."""
    now, before = _real(buffer), _real(start)
    if now.dtype == torch.bool:
        now, before = now.to(torch.int8), before.to(torch.int8)
    return torch.where(now == before, torch.zeros((), dtype=now.dtype, device=now.device), now - before).reshape(-1)


def _after(start: Tensor, moved: Tensor) -> Tensor:
    """The value that `start` has after moving by the mean movement."""
    before = _real(start)
    moved = moved.view(before.shape)
    if start.dtype == torch.bool:
        return (before.to(moved) + moved) >= 0.5
    if not before.is_floating_point():
        moved = moved.round()
    after = before + moved.to(before.dtype)
    return torch.view_as_complex(after) if start.is_complex() else after


@torch.no_grad()
def average_buffers(model: nn.Module, group: Group) -> None:
    """Make the buffers equal on all ranks: floating-point statistics of BatchNorm's family by their mean, all others by rank 0's value."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if isinstance(module, _NormBase) and buffer.is_floating_point():
                group.all_reduce(buffer, "mean", place=f"for buffer {name}").wait()
            else:
                group.broadcast(buffer, place=f"for buffer {name}").wait()
