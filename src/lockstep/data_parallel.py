"""torch's contract, and nothing more: wrap a module, call backward, and `.grad` is the mean over all ranks.

    model = lockstep.DistributedDataParallel(net)
    loss.backward()                  # gradients leave bucket by bucket while it runs; when it returns they are averaged
    optimizer.step()

It divides by the world size, as torch's does: right where every rank holds as many samples, a mean of means where not. The Stepper
divides by the true weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lockstep.checks.replicas import ReplicaCheck
from lockstep.checks.start import compare_start, model_fields
from lockstep.checks.unused import UnusedCheck
from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction as choose_reduction
from lockstep.gradients.replicate import replicate
from lockstep.world import World

Checks = Literal["full", "start", "off"]


class DistributedDataParallel(nn.Module):
    """Averages the gradients of `module` over all ranks at the end of each backward.

    Ranks that were set up differently are an error here; then parameters and buffers are made equal to rank 0's. A parameter that gets no
    gradient on any rank is an error at the end of its backward, unless `find_unused_parameters` (or `static_graph`) says that it is
    meant: then its `.grad` stays None, as in torch. `checks`: "full" compares the replicas before the forwards that follow steps 1, 2 and
    every 100th; "start" only the set-up; "off" nothing.
    `bucket_cap_mb` bounds a bucket (MiB); `reduce` names how gradients are summed (auto, native, central). The wrapped module is
    `.module`; the hooks are on its parameters, so a forward through `.module` is reduced as well.
    Raises UsageError for a module without trainable parameters, ReplicaDivergence and UnusedParameters on all ranks alike.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        checks: Checks = "full",
        reduce: str = "auto",
        world: World | None = None,
    ) -> None:
        super().__init__()
        if not bucket_cap_mb > 0:
            raise UsageError(f"bucket_cap_mb={bucket_cap_mb}: a bucket holds more than 0 MiB")
        check_checks(checks)
        self.module = module
        self._world = world or World.current()
        group = self._world.group
        if checks != "off":
            compare_start(group, model_fields(module))
        replicate(module, group)
        reducer = Reducer(module, group, choose_reduction(reduce, group), bucket_bytes=int(bucket_cap_mb * 2**20))
        reducer.closing = True
        reducer.scale = 1 / group.size
        reducer.end_of_backward = self._finish
        self._reducer: Reducer | None = reducer
        self._unused = UnusedCheck(reducer, "skip" if find_unused_parameters or static_graph else "error")
        self._replicas = ReplicaCheck(group) if checks == "full" else None
        self._unchecked = 0  # backwards since the last forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._reducer is not None and self.training and torch.is_grad_enabled():
            if self._unchecked and self._replicas is not None:
                self._replicas([(name, parameter) for name, parameter in self.module.named_parameters()])
            self._unchecked = 0
            self._reducer.renew()
        return self.module(*args, **kwargs)

    def _finish(self) -> None:
        assert self._reducer is not None
        self._reducer.finish()
        self._unchecked += 1
        self._unused()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only add to `.grad`; the first backward after it sends the sum of all. Restores the old state, also after an exception."""
        if self._reducer is None:
            raise UsageError("no_sync() has no meaning inside a Stepper: its windows decide when gradients leave")
        with self._reducer.window(last=False):
            yield

    def give_up_reducer(self) -> Reducer:
        """Hand the reducer to a Stepper: backward no longer averages by itself."""
        if self._reducer is None:
            raise UsageError("this DistributedDataParallel already belongs to a Stepper")
        reducer, self._reducer = self._reducer, None
        reducer.end_of_backward = None
        reducer.closing = False
        reducer.scale = 1.0
        return reducer


def check_checks(checks: str) -> None:
    if checks not in ("full", "start", "off"):
        raise UsageError(f"checks={checks!r}: choose 'full', 'start' or 'off'")
