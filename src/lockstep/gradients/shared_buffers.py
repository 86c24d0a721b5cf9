"""Buffers as torch's wrapper treats them: every forward begins with one rank's on all ranks, or with what a hook makes of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group

Hook = Callable[[Any, dict[str, Tensor]], list[torch.futures.Future[Any]] | None]


class SharedBuffers:
    """The buffers of one module, looked up anew each time: a forward may assign another tensor."""

    def __init__(self, module: nn.Module, group: Group, ignored: Collection[str]) -> None:
        self._module, self._group, self._ignored = module, group, ignored
        self._hook: Hook | None = None
        self._state: object = None
        self.after_forward = False
        """Whether a hook runs after the forward, not before it."""
        self._futures: list[torch.futures.Future[Any]] = []

    def named(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def register(self, state: object, hook: Hook, *, after_forward: bool) -> None:
        """Have `hook(state, {name: buffer})` in place of the broadcast. It may return futures; the backward ends by waiting for them."""
        self._hook, self._state, self.after_forward = hook, state, after_forward

    @torch.no_grad()
    def share(self, root: Callable[[], int]) -> None:
        """Run the hook, or take the buffers of rank `root()`. A collective; nothing where the module has no buffers."""
        named = self.named()
        if not named:
            return
        if self._hook is not None:
            self._futures = list(self._hook(self._state, named) or ())
        else:
            self.broadcast(named.values(), root())

    @torch.no_grad()
    def broadcast(self, buffers: Iterable[Tensor], root: int = 0) -> None:
        """Overwrite the buffers by those of rank `root`, in one message. For autograd they have not changed: no backward reads them."""
        if self._group.size == 1:
            return
        largest_first = sorted((buffer for buffer in buffers if buffer.layout == torch.strided), key=lambda each: -each.element_size())
        flat = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in largest_first])  # so all are aligned
        self._group.broadcast(flat, root, place="for the buffers").wait()
        if self._group.rank != root:
            with torch.autograd._unsafe_preserve_version_counter(tuple(largest_first)):
                for buffer, octets in zip(largest_first, flat.split([buffer.nbytes for buffer in largest_first]), strict=True):
                    buffer.detach().copy_(octets.view(buffer.dtype).view(buffer.shape))

    def wait(self) -> None:
        """Wait for what a hook has begun."""
        while self._futures:
            self._futures.pop().wait()
