"""Which update a method means."""

from __future__ import annotations

from lockstep.method import Method
from lockstep.updates.replicated import Replicated
from lockstep.updates.sharded import Sharded
from lockstep.updates.update import Update


def choose_update(method: Method) -> Update:
    """A new one."""
    return Sharded() if method.update == "sharded" else Replicated()
