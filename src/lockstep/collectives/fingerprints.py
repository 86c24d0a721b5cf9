"""Fingerprints of collectives, in a page of memory that all ranks of a host map.

Before a collective starts, its rank writes down what it is: number, kind, dtype, shape, and the
place in the program. It compares this with what the other ranks have written. If two ranks call
different collectives, all ranks raise an error before any data is mixed. If a rank never comes, or
has died, the error names it. Without this, the others would wait in a call that cannot be
interrupted.

    page    one block a rank
    block   a header (latest number, number at which a mismatch was found, pid) and a ring of the
            last tags
    tag     its number and its text. The text is written first: if a number can be read, so can
            its text

x86 keeps the order of two writes of one process, and so do the mutexes that every c10d call takes.
At worst, a reordering would miss a comparison.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch

from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed
from lockstep.runtime import status
from lockstep.runtime.processes import DEAD, state
from lockstep.runtime.status import short_dtype

_HEADER = struct.Struct("=QQQ")  # latest number, number of a mismatch that was found here, pid
_WORD = 8  # bytes
_HEADER_SIZE = 64
_TAG = 256  # bytes: 8 of number, the rest text
_RING = 128  # tags; a rank that runs further ahead is not compared
BLOCK = _HEADER_SIZE + _RING * _TAG  # bytes of a page for each rank
_LOOK_FOR_THE_DEAD = 0.1  # seconds
_LET_THE_OTHERS_COME = 0.5  # seconds to wait after a mismatch, to report what each rank called
_LIBRARY = str(Path(__file__).parents[1]) + os.sep


class Uncompared:
    """The fingerprints of a group whose ranks do not compare their collectives."""

    compares = False

    def post(self, number: int, text: str) -> None:
        """Announce `text` as this rank's collective `number`, and compare it with what other ranks
        have announced. Raises CollectiveMismatch.
        """

    def compare(self, number: int) -> None:
        """Check that all ranks call the same collective `number`, once all have come to it. Raises
        CollectiveMismatch.
        """

    def wait(self, number: int, timeout: timedelta) -> None:
        """Return when all ranks have come to collective `number` and call the same."""

    def look(self, number: int, awaited: Sequence[int] = ()) -> None:
        """Raise an error about the other ranks, if there is one. This rank waits elsewhere."""

    def text_of(self, number: int) -> str:
        """Return the text of this rank's collective `number`; empty if it is no longer stored."""
        return ""

    def close(self) -> None:
        """Release the memory of the fingerprints."""


class HostFingerprints(Uncompared):
    """This rank's view of the page of one group whose members share a host."""

    compares = True

    def __init__(
        self, memory: mmap.mmap, rank: int, ranks: Sequence[int], *, places: bool = True
    ) -> None:
        """`places`: whether ranks must also call a collective from the same line of the program."""
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._places = places
        self._rank = rank
        self._ranks = tuple(ranks)  # numbers in the world, for messages
        self._others = [other for other in range(len(ranks)) if other != rank]
        self._looks = rank
        self._header = rank * BLOCK // _WORD
        _HEADER.pack_into(memory, rank * BLOCK, 0, 0, os.getpid())

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def post(self, number: int, text: str) -> None:
        start = self._rank * BLOCK + _HEADER_SIZE + (number % _RING) * _TAG
        words = self._words
        words[start // _WORD] = 0  # not to be read while it changes
        encoded = text.encode()[: _TAG - _WORD]
        self._memory[start + _WORD : start + _TAG] = encoded.ljust(_TAG - _WORD, b"\0")
        words[start // _WORD] = words[self._header] = number
        self._all_here(number)

    def compare(self, number: int) -> None:
        here = self._rank * BLOCK + _HEADER_SIZE + (number % _RING) * _TAG
        tag = self._memory[here : here + _TAG]
        for other in self._others:
            there = here + (other - self._rank) * BLOCK
            if self._memory[there : there + _TAG] != tag and self._differs(other, number):
                raise self._mismatch(number)

    def _all_here(self, number: int) -> bool:
        """Compare with the ranks that have come to `number`. Return True if all have. Raises
        CollectiveMismatch.
        """
        words = self._words
        all_here = True
        here = self._rank * BLOCK + _HEADER_SIZE + (number % _RING) * _TAG
        for other in self._others:
            header = other * BLOCK // _WORD
            if words[header + 1]:
                raise self._mismatch(words[header + 1])
            if words[header] < number:
                all_here = False
                continue
            there = here + (other - self._rank) * BLOCK
            same = self._memory[here : here + _TAG] == self._memory[there : there + _TAG]
            if not same and self._differs(other, number):
                raise self._mismatch(number)
        return all_here

    def _differs(self, other: int, number: int) -> bool:
        """Whether another rank's tag of `number` differs. False if that rank is far ahead and has
        overwritten it.
        """
        here = self._tag(self._rank, number)
        there = self._tag(other, number)
        local = self._memory[here : here + _TAG]
        remote = self._memory[there : there + _TAG]
        if local == remote:
            return False
        if not self._words[here // _WORD] == number == self._words[there // _WORD]:
            return False
        return self._places or _without_place(remote) != _without_place(local)

    def wait(self, number: int, timeout: timedelta) -> None:
        """Return when all ranks have come to collective `number` and call the same.

        Raises CollectiveMismatch, PeerFailed if a rank that has not come is dead, and
        CollectiveTimeout with the ranks that have not come.
        """
        if self._all_here(number):
            return
        begin = last_look = time.monotonic()
        pause = 0.0
        status.waits(True)
        while not self._all_here(number):
            # 0 yields the core: with more ranks than cores, the awaited rank may need it
            time.sleep(pause)
            now = time.monotonic()
            pause = 0.0 if now - begin < 0.001 else min(0.001, pause + 0.00005)
            if now - last_look > _LOOK_FOR_THE_DEAD:
                last_look = now
                self._look_for_the_dead(number, self._missing(number))
                if now - begin > timeout.total_seconds():
                    missing = [self._ranks[other] for other in self._missing(number)]
                    raise timed_out(number, self._text(self._rank, number), missing, timeout)
        status.waits(False)

    def look(self, number: int, awaited: Sequence[int] = ()) -> None:
        """Compare once. Raise PeerFailed if a dead rank has not come to `number`, or is one of the
        `awaited` ranks (numbers in this group), for which this rank waits within the collective.
        """
        missing = [] if self._all_here(number) else self._missing(number)
        self._look_for_the_dead(number, [*missing, *awaited])

    def text_of(self, number: int) -> str:
        return self._text(self._rank, number) or ""

    # -- messages ---------------------------------------------------------------------------------

    def _tag(self, rank: int, number: int) -> int:
        return rank * BLOCK + _HEADER_SIZE + (number % _RING) * _TAG

    def _text(self, rank: int, number: int) -> str | None:
        start = self._tag(rank, number)
        if self._words[start // _WORD] != number:
            return None
        return self._memory[start + _WORD : start + _TAG].rstrip(b"\0").decode(errors="replace")

    def _mismatch(self, number: int) -> CollectiveMismatch:
        # other ranks read it here while they wait
        self._words[self._header + 1] = number
        deadline = time.monotonic() + _LET_THE_OTHERS_COME
        while self._missing(number) and time.monotonic() < deadline:
            time.sleep(0.001)
        texts = [self._text(rank, number) for rank in range(len(self._ranks))]
        return different(number, texts, self._ranks)

    def _missing(self, number: int) -> list[int]:
        return [other for other in self._others if self._words[other * BLOCK // _WORD] < number]

    def _look_for_the_dead(self, number: int, among: Sequence[int]) -> None:
        """Raise PeerFailed if the process of one of these ranks has ended. Each call asks the system
        for one of them, the next one in turn: all ranks wait, and would ask for each other.
        """
        if not among:
            return
        other = among[self._looks % len(among)]
        self._looks += 1
        latest, _, pid = _HEADER.unpack_from(self._memory, other * BLOCK)
        if pid and state(pid) == DEAD:
            last = self._text(other, latest)
            act = "it had called no collective"
            if last:
                act = f"its last collective was #{latest}: {last}"
            raise PeerFailed(
                "peer-has-ended",
                peer=self._ranks[other],
                pid=pid,
                last=act,
                number=number,
                call=self._text(self._rank, number),
            )


def _without_place(tag: bytes) -> bytes:
    return tag.rsplit(b" at ", 1)[0]


def different(number: int, texts: Sequence[str | None], ranks: Sequence[int]) -> CollectiveMismatch:
    """Return the error that says what each rank calls as collective `number`. The text of a rank
    that has not come is None.
    """
    callers: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            callers.setdefault(text, []).append(rank)
    alike = len({text.rsplit(" at ", 1)[0] for text in callers}) == 1
    return CollectiveMismatch(
        "collective-places-differ" if alike else "collective-mismatch",
        number=number,
        calls="; ".join(f"{listed(ranks)} {text}" for text, ranks in callers.items()),
    )


def timed_out(
    number: int, call: str | None, missing: Sequence[int], timeout: timedelta
) -> CollectiveTimeout:
    """Return the error that names the ranks (of the world) that did not come to collective
    `number`.
    """
    return CollectiveTimeout(
        "collective-timeout",
        number=number,
        call=call,
        who=listed(missing),
        missing=missing,
        seconds=timeout.total_seconds(),
    )


# cached, because a program repeats its collectives
@lru_cache(maxsize=1024)
def described(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, detail: str, place: str
) -> str:
    """A collective in words: `all_reduce sum f32[1024] at train.py:71`."""
    operation = f"{kind} {detail}" if detail else kind
    sizes = ",".join(map(str, shape))
    return f"{operation} {short_dtype(dtype)}[{sizes}] {place}"


def call_site() -> str:
    """`at FILE:LINE` of the nearest frame outside this library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return f"at {frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def listed(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0,1,5`, `ranks 0-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {','.join(map(str, ranks))}"
