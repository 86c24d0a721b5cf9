"""Which update a method means."""

from __future__ import annotations

from torch import nn

from lockstep.collectives.group import Group
from lockstep.method import Method
from lockstep.updates.held import SplitNorm
from lockstep.updates.local_steps import LocalSteps
from lockstep.updates.replicated import Replicated
from lockstep.updates.server.update import Server
from lockstep.updates.sharded import Sharded
from lockstep.updates.update import Update


def choose_update(method: Method, model: nn.Module, everyone: Group, *, alone: bool, norm: SplitNorm | None = None) -> Update:
    """A new one. `alone`: this rank steps without the others now, which it need not from the beginning.

    `norm`: the gradient's, where this rank holds a part of the model only.
    """
    if alone and method.local is not None:
        assert method.sync_every is not None
        return LocalSteps(everyone, model, method.sync_every, method.local)
    if method.server is not None:
        return Server(everyone, model, method)
    return Sharded(norm) if method.update == "sharded" else Replicated(norm)
