"""Buffers of replicas that step alone (BatchNorm statistics): when the replicas synchronize, the
buffers move by the weighted mean of their movements since the last time.

Buffers that no rank's forward has changed do not travel, and keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.gradients.running_statistics import moved_by, movement, real


class SynchronizedBuffers:
    """The buffers of one model. All ranks call `changed`, `synchronize` and `restart` alike."""

    def __init__(self, model: nn.Module, everyone: Group) -> None:
        self._model = model
        self._everyone = everyone
        self.since = 0.0
        """The weight of this rank's steps since the last synchronization."""
        self.restart()

    def restart(self) -> None:
        """Take the buffers as they are now, equal on all ranks, as the start of the next movement."""
        self._start = {name: buffer.clone() for name, buffer in self.now().items()}
        self.since = 0.0

    def learned(self, weight: float) -> None:
        self.since += weight

    def now(self) -> dict[str, Tensor]:
        return {name: buffer.detach() for name, buffer in self._model.named_buffers()}

    def starts(self) -> dict[str, Tensor]:
        """The buffers as they were at the last synchronization."""
        present = self.now()
        return {name: value for name, value in self._start.items() if name in present}

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Copy these values into the buffers."""
        for name, buffer in self.now().items():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])

    def changed(self, wanted: bool) -> list[float]:
        """For each buffer, 1.0 if this rank's has moved, for the facts of a synchronization. Empty
        if not `wanted`.
        """
        if not wanted:
            return []
        buffers = self.now()
        return [float(not _same(now, self._start.get(name))) for name, now in buffers.items()]

    @torch.no_grad()
    def synchronize(self, changed: Sequence[float], total: float) -> None:
        """Synchronize the buffers. `changed` is, for each buffer, how many ranks have moved it;
        `total` is the weight of all ranks. A cache whose shape changes is left alone.
        """
        buffers = self.now()
        moving = []
        for (name, buffer), count in zip(buffers.items(), changed, strict=True):
            if count and name in self._start and self._start[name].shape == buffer.shape:
                moving.append(name)
        if moving:
            wide = torch.float32
            if any(buffers[name].dtype == torch.float64 for name in moving):
                wide = torch.float64
            movements = []
            for name in moving:
                moved = movement(real(buffers[name]), real(self._start[name]))
                movements.append(moved.reshape(-1).to(wide) * self.since)
            flat = torch.cat(movements)
            self._everyone.all_reduce(flat, place="for the buffers of a synchronization").wait()
            flat.mul_(1 / total if total > 0 else 0.0)
            means = flat.split([moved.numel() for moved in movements])
            for name, mean in zip(moving, means, strict=True):
                start = real(self._start[name])
                real(buffers[name]).copy_(moved_by(start, mean.view(start.shape)))
        self.restart()


def _same(now: Tensor, before: Tensor | None) -> bool:
    return before is not None and now.shape == before.shape and torch.equal(now, before)
