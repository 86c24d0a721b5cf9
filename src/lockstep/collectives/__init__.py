"""Functions that move tensors between ranks, and the algorithms by which they do it.

`all_reduce` and the others move tensors (api.py). An algorithm is a value, a `Schedule`: `schedule`
makes it by name, `prove` checks it, `Network` predicts its time, and `in_process` runs it over
tensors in one process. Nothing here depends on models.

The names are imported on first use, because most of them need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.collectives import in_process
    from lockstep.collectives.api import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from lockstep.collectives.group import Group
    from lockstep.collectives.work import Work
    from lockstep.schedules.algorithms import algorithms_of, schedule
    from lockstep.schedules.network import Link, Network
    from lockstep.schedules.prove import Proof, prove
    from lockstep.schedules.schedule import REDUCING, Kind, Round, Schedule, Transfer

__all__ = [
    "REDUCING",
    "Group",
    "Kind",
    "Link",
    "Network",
    "Proof",
    "Round",
    "Schedule",
    "Transfer",
    "Work",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "in_process",
    "prove",
    "reduce",
    "reduce_scatter",
    "scatter",
    "schedule",
]

_HOME = {
    "Group": "collectives.group",
    "Work": "collectives.work",
    "Link": "schedules.network",
    "Network": "schedules.network",
    "Proof": "schedules.prove",
    "prove": "schedules.prove",
    "algorithms_of": "schedules.algorithms",
    "schedule": "schedules.algorithms",
    **dict.fromkeys(("REDUCING", "Kind", "Round", "Schedule", "Transfer"), "schedules.schedule"),
}
"""The module of each name that is not in api.py."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(
            f"module 'lockstep.collectives' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    if name == "in_process":
        return import_module("lockstep.collectives.in_process")
    home = _HOME.get(name, "collectives.api")
    value = getattr(import_module(f"lockstep.{home}"), name)
    globals()[name] = value
    return value
