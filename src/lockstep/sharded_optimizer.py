"""An optimizer whose work and state are divided among the ranks: torch's ZeroRedundancyOptimizer, for loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.collectives.group import Group
from lockstep.errors import UsageError
from lockstep.gradients.layout import BUCKET, Entry, plan
from lockstep.updates.shards import Shards, check_elementwise
from lockstep.updates.state_dict import State, pack, unpack
from lockstep.world import World


class ShardedOptimizer(Optimizer):
    """Takes the place of `torch.distributed.optim.ZeroRedundancyOptimizer`: same arguments, same contract.

        optimizer = lockstep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        optimizer.step()                                  # after gradients were averaged, by any DistributedDataParallel
        optimizer.consolidate_state_dict(to=0)            # on every rank; then rank 0 has optimizer.state_dict()

    Each rank holds 1/W of the state of `optimizer_class` (an elementwise one of torch.optim's) and updates 1/W of every flat tensor of
    parameters; then all exchange what they have updated, on one host through shared memory. The weights have the bits that the whole
    optimizer gives on every rank. The parameters keep their identity; their memory moves, so make views of them afterwards.

    `step`, `consolidate_state_dict`, `load_state_dict` and `add_param_group` are collective: every rank of the group calls them.
    Raises UsageError for an optimizer that is not elementwise, and for `overlap_with_ddp`, which only torch's own hooks can do.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,  # they always are
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        check_elementwise(optimizer_class)
        if overlap_with_ddp:
            raise UsageError(
                "overlap_with_ddp=True hands the step to torch's own hook: leave it out, or use a Stepper with update='sharded'"
            )
        self._group = World.current().group if process_group is None else Group.of(process_group)
        self._inner: Optimizer | None = None
        whole = optimizer_class(params, **defaults)  # has an opinion on every group; then it gets the pieces
        super().__init__(whole.param_groups, whole.defaults)
        self._inner = whole
        self._consolidated: dict[str, Any] | None = None
        self._cut({id(parameter): state for parameter, state in whole.state.items()})

    def _cut(self, states: Mapping[int, State]) -> None:
        assert self._inner is not None
        parameters = list(dict.fromkeys(each for group in self.param_groups for each in group["params"] if each.requires_grad))
        entries = [Entry(f"parameter {number}", each.numel(), each.dtype, each.device) for number, each in enumerate(parameters)]
        self._shards = Shards(parameters, plan(entries, range(len(entries)), bucket=BUCKET, first_bucket=BUCKET), self._group)
        numbers = {id(each): number for number, each in enumerate(parameters)}
        self._inner.state.clear()
        self._inner.param_groups = [
            {**group, "params": [piece for each in group["params"] for piece in self._shards.mine_of(each)]} for group in self.param_groups
        ]
        for key, state in states.items():
            if key in numbers:
                self._shards.cut_state(self._inner, numbers[key], state)

    def _states(self) -> dict[int, State]:
        assert self._inner is not None
        return {id(self._shards.parameters[number]): state for number, state in self._shards.whole_states(self._inner)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters. Every rank calls it."""
        inner: Optimizer | None = getattr(self, "_inner", None)
        if inner is None:
            super().add_param_group(param_group)
            return
        states = self._states()
        super().add_param_group(param_group)
        self._cut(states)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shard with its part of every `.grad`, and exchange the parameters. Returns what `closure` returns."""
        assert self._inner is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):  # a scheduler writes to the outer ones
            inner.update({name: value for name, value in outer.items() if name != "params"})
        self._consolidated = None
        self._shards.take_gradients()
        self._inner.step()
        self._shards.gather()
        return loss

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the whole state together, for `state_dict()` on rank `to`. Every rank calls it."""
        states = self._states()
        self._consolidated = pack(self.param_groups, self._wholes, states) if self._group.rank == to else None

    def state_dict(self) -> dict[str, Any]:
        """The whole optimizer's state in torch's form: it loads into `optimizer_class` itself, and at any number of ranks.

        Raises UsageError where `consolidate_state_dict` has not brought it here since the last step.
        """
        if self._consolidated is None:
            raise UsageError(
                f"rank {self._group.rank} holds its own shard only: call consolidate_state_dict(to={self._group.rank}) on every rank first, after the step"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole optimizer's state. Every rank calls it, with the same."""
        options, states = unpack(state_dict, self._wholes)
        for group, option in zip(self.param_groups, options, strict=True):
            group.update(option)
        self._consolidated = None
        self._cut(states)

    @property
    def _wholes(self) -> list[list[torch.Tensor]]:
        return [list(group["params"]) for group in self.param_groups]
