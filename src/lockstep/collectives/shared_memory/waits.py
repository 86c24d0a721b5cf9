"""Waiting until another process's number in shared memory grows: never without end, and never at
the cost of the process it waits for.

If every rank has a core, a wait spins for a short time, which is mostly enough. Then it yields the
core for a while, and then it naps. If ranks share cores, it yields at once, and then sleeps until
it is woken, with the kernel's futex, for which Python has no function. A sleeper passes the number
that it saw; the kernel compares it before the sleep, so no change is missed. x86-64 Linux only,
like all of this folder.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from lockstep.errors import PeerFailed
from lockstep.runtime import status

_SPINS = 300
_YIELDS = 0.002  # seconds
_LONGEST_NAP = 0.001
_LOOK = 0.1  # seconds between two checks whether the other ranks live
_WORD = 8  # bytes


class Waits:
    """How the flags of a group wait on the words of `view`, which are at `address`.

    `crowded` is whether ranks share cores; it is the same on all ranks. `look(ranks)` raises an
    error if one of the ranks has ended. `late(ranks)` makes the error after `timeout()` seconds.
    """

    def __init__(
        self,
        view: memoryview,
        address: int,
        *,
        crowded: bool,
        look: Callable[[Sequence[int]], None],
        late: Callable[[Sequence[int]], Exception],
        timeout: Callable[[], float],
    ) -> None:
        self.view = view
        self.address = address
        self.crowded = crowded
        self._look = look
        self._late = late
        self._timeout = timeout
        self._yields = _YIELDS

    def close(self) -> None:
        """Release the memory, and the references to its group."""
        self.view.release()
        del self._look, self._late, self._timeout

    def nap(self) -> None:
        """From now on sleep until woken. This is for a thread beside one that computes: a spinning
        thread would keep the interpreter lock from it, and yielding the core does not release that
        lock. All ranks call it.
        """
        self.crowded = True
        self._yields = 0.0

    def wait(self, words: Sequence[int], least: int) -> None:
        """Return when every one of these words (by rank) is `least` or more."""
        status.waits(True)
        begin = looked = time.monotonic()
        nap = 0.0
        while True:
            missing = self._missing(words, least)
            if not missing:
                break
            now = time.monotonic()
            if now - begin < self._yields:
                os.sched_yield()
                continue
            if self.crowded:
                behind = words[missing[0]]
                seen = self.view[behind]
                if seen < least:
                    futex_sleep(self.address + _WORD * behind, seen, _LOOK)
            else:
                nap = min(_LONGEST_NAP, nap + 0.00002)
                time.sleep(nap)
            if now - looked > _LOOK:
                looked = now
                self._look_for(self._missing(words, least), words, least)
                if now - begin > self._timeout():
                    raise self._late(self._missing(words, least))
        status.waits(False)

    def _look_for(self, missing: list[int], words: Sequence[int], least: int) -> None:
        try:
            self._look(missing)
        except PeerFailed:
            # else it posted its number, and then ended
            if self._missing(words, least) == missing:
                raise

    def _missing(self, words: Sequence[int], least: int) -> list[int]:
        return [rank for rank, word in enumerate(words) if self.view[word] < least]


class Flag:
    """One number for each rank. It only grows, and the other ranks wait for it."""

    def __init__(self, waits: Waits, words: Sequence[int], rank: int) -> None:
        """`words`: the index of each rank's word."""
        self._waits = waits
        self._words = words
        self._own = words[rank]

    def post(self, number: int) -> None:
        """Write this rank's number, which the other ranks see, and wake those that sleep."""
        waits = self._waits
        waits.view[self._own] = number
        if waits.crowded:
            futex_wake(waits.address + _WORD * self._own)

    def reached(self, least: int) -> bool:
        """Whether every rank's number is `least` or more, without waiting."""
        view = self._waits.view
        for word in self._words:  # noqa: SIM110 - a generator costs a call for each rank
            if view[word] < least:
                return False
        return True

    def until(self, least: int) -> None:
        """Return when every rank's number is `least` or more."""
        waits = self._waits
        view = waits.view
        for _ in range(1 if waits.crowded else _SPINS):
            for word in self._words:
                if view[word] < least:
                    break
            else:
                return
        waits.wait(self._words, least)


def crowded(cores_of: Sequence[Sequence[int]]) -> bool:
    """Whether there are more ranks than cores. `cores_of` has the cores of each rank."""
    return len(cores_of) > len(set().union(*cores_of))


# numbers of the system call and of its operations between processes (include/uapi/linux/futex.h)
_FUTEX = 202
_WAIT = 0
_WAKE = 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall


def futex_sleep(address: int, seen: int, seconds: float) -> None:
    """Sleep in the kernel. Return when the word at `address` is woken, no longer holds `seen`, or
    the time is over. A signal may end it early.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _call(
        _FUTEX,
        ctypes.c_void_p(address),
        _WAIT,
        ctypes.c_uint32(seen & 2**32 - 1),
        ctypes.byref(limit),
        None,
        0,
    )


def futex_wake(address: int) -> None:
    """Wake all processes that sleep on the word at `address`."""
    _call(_FUTEX, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
