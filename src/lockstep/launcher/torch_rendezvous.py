"""How torch in a rank's process finds the launcher and its store.

torchrun has environment variables for this. Processes that a rank starts inherit them, and then
wait for a store that nobody opens. So the rank changes torch in its own process only.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from datetime import timedelta
from typing import Any

from lockstep.launcher.when_imported import when_imported
from lockstep.runtime.launched import Launcher


def join_store_of(launcher: Launcher) -> None:
    """Make `env://` and `tcp://` connect to the launcher's store if they lead there, on rank 0 too.
    Every other address gets torch's own behaviour: rank 0 opens the store.

    The store stays when a program destroys its process group and makes another, so each gets keys of
    its own: a rank must not find the addresses of the first.
    """
    groups = itertools.count()

    def change(rendezvous: Any) -> None:
        create_by_torch = rendezvous._create_c10d_store

        @functools.wraps(create_by_torch)
        def create_store(
            host: str, port: int, rank: int, size: int, timeout: timedelta, *options: object
        ) -> Any:
            if not launcher.holds(host, port):
                return create_by_torch(host, port, rank, size, timeout, *options)
            store = rendezvous.TCPStore(
                launcher.address, port, size, is_master=False, timeout=timeout
            )
            from torch.distributed import PrefixStore

            return PrefixStore(f"group-{next(groups)}", store)

        rendezvous._create_c10d_store = create_store

    when_imported("torch.distributed.rendezvous", change)


def be_launched_for_libraries() -> None:
    """Make `torch.distributed.is_torchelastic_launched()` true in this process. Lightning asks it
    whether the ranks have been started already.
    """
    rank_pid = os.getpid()

    def change(c10d: Any) -> None:
        launched_by_torch = c10d.is_torchelastic_launched

        @functools.wraps(launched_by_torch)
        def is_torchelastic_launched() -> bool:
            return os.getpid() == rank_pid or bool(launched_by_torch())

        c10d.is_torchelastic_launched = is_torchelastic_launched
        package: Any = sys.modules.get("torch.distributed")
        if getattr(package, "is_torchelastic_launched", None) is launched_by_torch:
            package.is_torchelastic_launched = is_torchelastic_launched

    when_imported("torch.distributed.distributed_c10d", change)
