"""Functions that move tensors between ranks (see api.py). Nothing here depends on models.

The names are imported on first use, because they need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

__all__ = [
    "Group",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(
            f"module 'lockstep.collectives' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    home = {"Group": "group", "Work": "work"}.get(name, "api")
    found = getattr(import_module(f"lockstep.collectives.{home}"), name)
    globals()[name] = found
    return found
