"""Compares the replicas of a plain torch script, whose ranks train without Lockstep
(`lockstep run --check-replicas`).

After a step of an optimizer a rank writes digests of its parameters into torch's store, then reads
what other ranks have written for the same step. It waits for none of them: the last one sees all.
Optimizers are numbered in the order of their first steps. Compared are parameters of modules that
every rank has whole.
"""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lockstep.errors import ReplicaDivergence
from lockstep.launcher.when_imported import when_imported

_EVERY = 100  # steps between comparisons, after the first two


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer."""

    number: int
    count: int = 0
    version: int = -1
    """Of its first parameter's memory, after the last step."""


class ScriptReplicas:
    """The comparisons of one rank."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[Any, _Steps] = WeakKeyDictionary()
        self._store: Any = None  # of the process group, which may be destroyed before the last one
        self._rank, self._size = 0, 1
        when_imported(
            "torch.optim.optimizer",
            lambda module: module.register_optimizer_step_post_hook(self._stepped),
        )

    def _stepped(self, optimizer: Any, args: object, kwargs: object) -> None:
        steps = self._steps.setdefault(optimizer, _Steps(len(self._steps)))
        steps.count += 1
        parameters = _replicated(optimizer)
        if not parameters or not self._joined():
            return
        steps.version = parameters[0]._version
        if steps.count <= 2 or steps.count % _EVERY == 0:
            when = f"after step {steps.count}"
            self._compare(f"{steps.number}/{steps.count}", when, parameters)

    def compare_at_end(self) -> None:
        """Compare the weights of the last steps, when the script has ended. Weights that the script
        has changed since then are its own.
        """
        for optimizer, steps in list(self._steps.items()):
            parameters = _replicated(optimizer)
            if parameters and self._store is not None and parameters[0]._version == steps.version:
                self._compare(
                    f"{steps.number}/end", f"after the last step ({steps.count})", parameters
                )

    def _joined(self) -> bool:
        """Whether this rank has a process group with others."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if self._store is None and dist.is_initialized():
            store = distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("lockstep/replicas", store)
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
        return self._size > 1

    def _compare(self, key: str, when: str, parameters: list[Any]) -> None:
        """Raises ReplicaDivergence if a rank has written other digests."""
        import torch.distributed as dist

        from lockstep.checks.divergence import digest

        shapes = [list(parameter.shape) for parameter in parameters]
        local = [digest([parameter.detach()]) for parameter in parameters]
        with suppress(dist.DistError):  # the store ends with the rank that hosts it
            self._store.set(f"{key}/{self._rank}", json.dumps([shapes, local]))
            for rank in range(self._size):
                if rank == self._rank or not self._store.check([f"{key}/{rank}"]):
                    continue
                others_shapes, remote = json.loads(self._store.get(f"{key}/{rank}"))
                if others_shapes == shapes and remote != local:
                    pairs = zip(parameters, local, remote, strict=True)
                    self._report([p for p, mine, theirs in pairs if mine != theirs], rank, when)

    def _report(self, differing: list[Any], rank: int, when: str) -> None:
        """Raise ReplicaDivergence, if a parameter of a module differs."""
        from lockstep.collectives.fingerprints import listed

        names = _names()
        named = [names[id(parameter)] for parameter in differing if id(parameter) in names]
        if named:
            ranks = sorted([self._rank, rank])
            raise ReplicaDivergence(
                "replicas-of-script-differ",
                when=when,
                parameter=named[0],
                ranks=ranks,
                who=listed(ranks),
                count=len(named),
            )


def _replicated(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer that this rank has whole."""
    parameters = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not hasattr(parameter, "_local_tensor") and not hasattr(parameter, "_local_shard"):
                parameters.append(parameter)
    return parameters


def _names() -> dict[int, str]:
    """The names of all modules' parameters, by their identities; the longest name of each, which is
    that in the outermost module.
    """
    import torch

    names: dict[int, str] = {}
    for value in gc.get_objects():
        if not issubclass(type(value), torch.nn.Module):
            continue
        with suppress(Exception):  # a module of the script's that is only half built
            for name, parameter in value.named_parameters():
                if len(name) > len(names.get(id(parameter), "")):
                    names[id(parameter)] = name
    return names
