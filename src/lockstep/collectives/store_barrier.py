"""Synchronization through the store: a barrier that names missing ranks, and a block that rank 0
runs first.

Both use the key-value store of the process group, not collectives. So a rank that never comes
cannot leave the others in a call that cannot be interrupted. One write decides a barrier: the first
rank that stores the outcome (all here, or the missing ranks) decides it for all, also for ranks
that come later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.collectives.fingerprints import listed
from lockstep.errors import BarrierTimeout, LockstepError, PeerFailed

_ALL_HERE = "all"
_HEARTBEAT = timedelta(seconds=1)


def wait(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    look: Callable[[], None] = lambda: None,
    what: str = "reach the barrier",
    clock: Any = time,
) -> None:
    """Return when all `size` ranks have called this with the same `name`; a name is used once.

    `what` says in the error what the missing ranks have not done. While this rank waits, it calls
    `look` from time to time, which may raise another error about the ranks. `clock` has the
    functions of the module `time`. Raises BarrierTimeout
    on every rank, also on late ones, if some ranks have not come when the first rank has waited for
    `timeout`.
    """
    if size == 1:
        return
    deadline = clock.monotonic() + timeout.total_seconds()
    outcome = f"{name}/outcome"
    try:
        store.set(f"{name}/here/{rank}", "1")
        if store.add(f"{name}/count", 1) == size:
            store.compare_set(outcome, "", _ALL_HERE)
        pause = 0.0005
        while not store.check([outcome]):
            if clock.monotonic() > deadline:
                missing = [
                    other for other in range(size) if not store.check([f"{name}/here/{other}"])
                ]
                store.compare_set(outcome, "", ",".join(map(str, missing)) or _ALL_HERE)
                break
            clock.sleep(pause)
            pause = min(2 * pause, 0.02)
            if pause == 0.02:
                look()
        decision = store.get(outcome).decode()
    except dist.DistError as error:
        raise PeerFailed("store-lost", rank=rank, error=str(error)) from error
    if decision != _ALL_HERE:
        missing = [int(number) for number in decision.split(",")]
        raise BarrierTimeout(
            "barrier-came-late" if rank in missing else "barrier-timeout",
            missing=missing,
            who=listed(missing),
            size=size,
            what=what,
            seconds=timeout.total_seconds(),
        )


@contextmanager
def first(
    store: dist.Store, name: str, rank: int, size: int, timeout: timedelta | None
) -> Iterator[bool]:
    """Run the block on rank 0 (which gets True), then on the others. They wait as long as rank 0
    shows signs of life.

    Raises LockstepError on the waiting ranks if rank 0's block raised, or if no sign of life came
    for `timeout` (default 30 s).
    """
    alive = f"{name}/alive"
    left = f"{name}/left"
    if rank == 0:
        with _alive(store, alive) if size > 1 else nullcontext():
            try:
                yield True
            except BaseException as error:
                store.set(left, f"{type(error).__name__}: {error}")
                raise
        store.set(left, "")
        return
    patience = (timeout or timedelta(seconds=30)).total_seconds()
    beats = -1
    deadline = 0.0
    try:
        while not store.check([left]):
            current = _count(store, alive)
            if current != beats:
                beats = current
                deadline = time.monotonic() + patience
            if time.monotonic() > deadline:
                raise PeerFailed("peer-shows-no-sign-of-life", rank=rank, seconds=patience)
            time.sleep(0.02)
        failure = store.get(left).decode()
    except dist.DistError as error:
        raise PeerFailed("store-lost", rank=rank, error=str(error)) from error
    if failure:
        raise PeerFailed("peer-failed-in-first", rank=rank, why=failure)
    yield False


@contextmanager
def _alive(store: dist.Store, key: str) -> Iterator[None]:
    """Increment `key` once a second from a thread, while the block runs."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_HEARTBEAT.total_seconds()):
            store.add(key, 1)

    thread = threading.Thread(target=beat, name="lockstep-first", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wait_for_count(store: dist.Store, key: str, count: int, timeout: timedelta) -> None:
    """Wait until the counter `key` has reached `count`. Raises LockstepError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        arrived = _count(store, key)
        if arrived >= count:
            return
        if time.monotonic() > deadline:
            raise LockstepError(
                "too-few-ranks-came", here=arrived, count=count, seconds=timeout.total_seconds()
            )
        time.sleep(0.005)


def _count(store: dist.Store, key: str) -> int:
    """Return a counter's value without writing: a FileStore keeps every write."""
    if store.check([key]):
        return int(store.get(key))
    return 0
