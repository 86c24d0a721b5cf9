"""An optimizer whose work and state are divided among the ranks, with the interface of torch's
ZeroRedundancyOptimizer, for training loops without a Stepper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from lockstep.checks.trainable import needs_closure
from lockstep.collectives.addition_order import BLOCK
from lockstep.collectives.api import resolve
from lockstep.errors import UsageError
from lockstep.gradients.layout import BUCKET, Entry, plan
from lockstep.updates.optimizer_state import CutOptimizer
from lockstep.updates.shards import Shards, WholeParameters, elementwise
from lockstep.world.world import World


class ShardedOptimizer(Optimizer, Joinable):
    """An optimizer whose state is divided among the ranks, with the arguments and the behavior of
    `torch.distributed.optim.ZeroRedundancyOptimizer`.

    Each rank holds 1/W of the state and updates 1/W of the parameters, where W is the world size.
    Then the ranks exchange the updated parameters, on one host through shared memory. The weights
    have the same bits as with an undivided optimizer.

    - An elementwise optimizer of torch.optim gets slices of flat tensors. The parameters stay the
      same objects, but their memory moves: create views of them afterwards.
    - Any other optimizer, and one with very few elements, gets whole parameters, each on one rank.
      A value that it computes over several parameters (a norm of all gradients) covers only the
      parameters of this rank, as in torch's class.

    `step`, `consolidate_state_dict`, `load_state_dict` and `add_param_group` are collective: every
    rank of the group calls them. `optim` is this rank's optimizer.

    Example::

        optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        optimizer.step()  # after the gradients are averaged
        optimizer.consolidate_state_dict(to=0)  # then rank 0 can call optimizer.state_dict()

    Args:
        params: parameters, or groups of them, equal on all ranks.
        optimizer_class: the class of the optimizer that updates each rank's part.
        process_group: the ranks among which the state is divided. Default: all ranks.
        parameters_as_bucket_view: no effect; slices are always views of one tensor.
        overlap_with_ddp: not supported; True raises UsageError. Only torch's own hooks can do it.
        defaults: the arguments of `optimizer_class`.

    Raises:
        UsageError: an optimizer whose step needs a closure, sparse parameters, or
            `overlap_with_ddp`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,  # no effect: slices are always views
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise UsageError(
                "keyword-without-meaning",
                name="overlap_with_ddp",
                value=True,
                instead="leave it out, or use a Stepper with update='sharded'",
            )
        self._group = World.current().group if process_group is None else resolve(process_group)
        self._cut: CutOptimizer[Shards | WholeParameters] | None = None
        # The class checks all groups and fills in defaults; then it gets only this rank's part.
        optimizer = optimizer_class(params, **defaults)
        if needs_closure(optimizer):
            raise UsageError("optimizer-needs-closure", optimizer=optimizer_class.__name__)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        Joinable.__init__(self)
        optimizer.param_groups = [dict(group) for group in self.param_groups]
        self.optim = optimizer
        """The optimizer of this rank, over slices or over whole parameters."""
        # ids of parameters that were ever trained, or that have optimizer state
        self._ever = set(map(id, optimizer.state))
        self._consolidated: dict[str, Any] | None = None
        self._cut = CutOptimizer(optimizer, self._shards, self._trained)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks among which work and state are divided."""
        return self._group.process_group

    @property
    def _all_params(self) -> list[torch.Tensor]:
        groups = [group["params"] for group in self.param_groups]
        return list(dict.fromkeys(itertools.chain.from_iterable(groups)))

    def _trained(self) -> list[int]:
        """Return the ids of the parameters that are or once were trained. The list changes when a
        never trained parameter is unfrozen; a parameter that is frozen later stays in it.
        """
        return [
            id(parameter)
            for parameter in self._all_params
            if parameter.requires_grad or id(parameter) in self._ever
        ]

    def _shards(self) -> Shards | WholeParameters:
        """Return the division of the parameters among the ranks."""
        parameters = self._all_params
        for parameter in parameters:
            if parameter.layout is not torch.strided:
                raise UsageError(
                    "sparse-tensor",
                    tensor=f"a parameter of shape {list(parameter.shape)}",
                    layout=str(parameter.layout),
                )
        # parameters that were frozen after training keep their state
        self._ever |= set(self._trained())
        trained = [parameter for parameter in parameters if id(parameter) in self._ever]
        size = sum(parameter.numel() for parameter in trained)
        if not elementwise(type(self.optim)) or size < self._group.size * BLOCK:
            return WholeParameters(parameters, self._group)
        entries = [
            Entry(f"parameter {number}", parameter.numel(), parameter.dtype, parameter.device)
            for number, parameter in enumerate(trained)
        ]
        layout = plan(entries, range(len(entries)), bucket=BUCKET, first_bucket=BUCKET)
        # the ignore: an optimizer may also hold plain tensors
        return Shards(trained, layout, self._group)  # type: ignore[arg-type]

    @property
    def _pieces(self) -> CutOptimizer[Shards | WholeParameters]:
        """The divided optimizer, after the options of the outer groups (which a scheduler may have
        changed) are copied to `optim`.
        """
        assert self._cut is not None
        _copy_options(self.param_groups, self.optim.param_groups)
        return self._cut

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters. Every rank calls it.

        Args:
            param_group: as for `torch.optim.Optimizer.add_param_group`.
        """
        super().add_param_group(param_group)
        if getattr(self, "_cut", None) is not None:
            self._consolidated = None
            self.optim.param_groups.append(dict(self.param_groups[-1]))
            self._pieces.follow()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's part of the parameters, and exchange them. Every rank calls it.

        Args:
            closure: a function that computes the loss again, with gradients.
            options: further arguments for the step of `optimizer_class`.

        Returns:
            The return value of `closure`.
        """
        pieces = self._pieces
        pieces.follow()
        self._consolidated = None
        if isinstance(pieces.shards, WholeParameters):
            if closure is not None:
                options["closure"] = closure
            loss = self.optim.step(**options)
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            pieces.shards.take_gradients()
            self.optim.step(**options)
        pieces.shards.gather()
        _copy_options(self.optim.param_groups, self.param_groups)  # options that the step changed
        return loss

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which torch's `Join` lets this rank update its part while only
        other ranks have inputs.

        Args:
            kwargs: keywords of torch's `Join`; no effect.
        """
        return _StepsOn(self)

    @property
    def join_device(self) -> torch.device:
        """The device on which torch's `Join` counts the ranks."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that torch's `Join` counts."""
        return self.process_group

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state on one rank, for `state_dict()` there. Every rank calls it.

        Args:
            to: the rank that gets the state.
        """
        state = self._pieces.state_dict()
        self._consolidated = state if self._group.rank == to else None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole optimizer's state in torch's form. It loads into `optimizer_class`, and
        into a ShardedOptimizer at any number of ranks.

        Raises:
            UsageError: `consolidate_state_dict` was not called for this rank since the last step.
        """
        if self._consolidated is None:
            raise UsageError(
                "needs-call-before",
                call=f"state_dict() on rank {self._group.rank}",
                before=f"consolidate_state_dict(to={self._group.rank}) on every rank",
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole optimizer's state. Every rank calls it with the same state.

        Args:
            state_dict: from `state_dict`, or from `optimizer_class`.
        """
        self._consolidated = None
        self._pieces.load_state_dict(state_dict)
        _copy_options(self.optim.param_groups, self.param_groups)


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Copy all options of the groups, but not their parameters."""
    for source_group, target_group in zip(source, target, strict=True):
        options = {name: value for name, value in source_group.items() if name != "params"}
        target_group.update(options)


class _StepsOn(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer.step()
