"""Ranks that meet through the store: a barrier that names who is missing, and a turn for rank 0.

Both go through the key-value store of the process group and not through collectives, so that a rank
that never comes cannot leave the others in a call that nobody can interrupt. One write decides:
whoever first stores the outcome (all here, or who is missing) has decided it for everybody, also
for those who come later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from lockstep.errors import BarrierTimeout, LockstepError, PeerFailed

_ALL_HERE = "all"
_HEARTBEAT = timedelta(seconds=1)


class Clock(Protocol):
    """As the module `time`."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def meet(
    store: dist.Store,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    look: Callable[[], None] = lambda: None,
    what: str = "reach the barrier",
    clock: Clock = time,
) -> None:
    """Return when all `size` ranks have called this with the same `name`; a name is used once.

    `what` those have not done that do not come, for the message. `look` is called every now and
    then while this rank waits, to raise what else may have happened to the others. Raises
    BarrierTimeout on every rank, the late ones included, when some did not come within `timeout` of
    the first that gave up.
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
        decided = store.get(outcome).decode()
    except dist.DistError as error:
        raise PeerFailed("store-lost", rank=rank, error=str(error)) from error
    if decided != _ALL_HERE:
        missing = [int(part) for part in decided.split(",")]
        raise BarrierTimeout(
            "barrier-came-late" if rank in missing else "barrier-timeout",
            missing=missing,
            who=f"rank {missing[0]}"
            if len(missing) == 1
            else f"ranks {', '.join(map(str, missing))}",
            size=size,
            what=what,
            seconds=timeout.total_seconds(),
        )


@contextmanager
def first(
    store: dist.Store, name: str, rank: int, size: int, timeout: timedelta | None
) -> Iterator[bool]:
    """Rank 0 enters at once (and gets True); the others enter when it has left, however long that
    takes, as long as it shows signs of life.

    Raises LockstepError on the waiting ranks when rank 0's block raised, or when no sign of life
    came for `timeout` (default 30 s).
    """
    if rank == 0:
        with _alive(store, f"{name}/alive") if size > 1 else nullcontext():
            try:
                yield True
            except BaseException as error:
                store.set(f"{name}/left", f"{type(error).__name__}: {error}")
                raise
        store.set(f"{name}/left", "")
        return
    patience = (timeout or timedelta(seconds=30)).total_seconds()
    beat, since = -1, time.monotonic()
    try:
        while not store.check([f"{name}/left"]):
            now = store.add(f"{name}/alive", 0)
            if now != beat:
                beat, since = now, time.monotonic()
            if time.monotonic() - since > patience:
                raise PeerFailed("peer-shows-no-sign-of-life", rank=rank, seconds=patience)
            time.sleep(0.02)
        why = store.get(f"{name}/left").decode()
    except dist.DistError as error:
        raise PeerFailed("store-lost", rank=rank, error=str(error)) from error
    if why:
        raise PeerFailed("peer-failed-in-first", rank=rank, why=why)
    yield False


@contextmanager
def _alive(store: dist.Store, key: str) -> Iterator[None]:
    """Count up `key` once a second from a thread, for as long as the block runs."""
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
    """Wait until `key` has been counted up to `count`. Raises LockstepError after `timeout`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (here := store.add(key, 0)) < count:
        if time.monotonic() > deadline:
            raise LockstepError(
                "too-few-ranks-came", here=here, count=count, seconds=timeout.total_seconds()
            )
        time.sleep(0.005)
