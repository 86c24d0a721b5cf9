"""Which update a name means."""

from __future__ import annotations

from lockstep.errors import UsageError
from lockstep.updates.replicated import Replicated
from lockstep.updates.sharded import Sharded
from lockstep.updates.update import Update

UPDATES: dict[str, type[Replicated] | type[Sharded]] = {"replicated": Replicated, "sharded": Sharded}


def choose_update(name: str) -> Update:
    """A new update of that name. Raises UsageError for an unknown one."""
    if name not in UPDATES:
        raise UsageError(f"update={name!r}: choose one of {', '.join(UPDATES)}")
    return UPDATES[name]()
