"""What this rank is doing, on a page of memory in a file: its launcher reads it without asking,
also where the rank hangs or is dead.

    page    one block of fixed fields (step, phase, since when, latest collective, ...) and a ring
            of the last collectives in words
    phase   start, data, forward, backward, reduce, optimizer, checks, checkpoint, evaluate; "loop"
            is the user's code between steps; "end": the program is over

Without a launcher of ours there is no page. The clock of a training's steps (step_clock.py) hears
the same. Only the main thread notes: what threads of a library do beside it does not say where a
rank is. Nothing here takes a lock or may raise.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.step_clock import INDEX, PHASES, StepClock

# grows with everything that is noted: whoever sees it stand still sees a rank that does
_TICKS = struct.Struct("=Q")
# ticks, phase, waits (1 in a collective, 2 for messages), step, since (monotonic ns), latest
# collective
_STATE = struct.Struct("=QIIqQQ")
_WAITED = struct.Struct("=Q")  # ns, in all
_TOTALS = struct.Struct(f"={len(PHASES)}Q")  # ns spent in each phase, in all
_AT_WAITED = 64
_AT_OPENED = 72
_AT_TOTALS = 128
_AT_RING = 256
_RING = 16
_ENTRY = 240  # bytes: 8 of number, the rest text
_SIZE = _AT_RING + _RING * _ENTRY
_NUMBER = struct.Struct("=Q")


class Page:
    """This rank's, to be written by its main thread."""

    def __init__(self, file: Path) -> None:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _SIZE)
            self._memory = mmap.mmap(handle, _SIZE)
        finally:
            os.close(handle)
        self._owner = threading.get_ident()
        self._ticks, self.phase, self._waits, self._step = 0, 0, 0, 0
        self._since, self._number = time.monotonic_ns(), 0
        self._began_to_wait, self._waited = 0, 0
        self._totals = [0] * len(PHASES)
        self._put()

    def _put(self) -> None:
        self._ticks += 1
        _STATE.pack_into(
            self._memory,
            0,
            self._ticks,
            self.phase,
            self._waits,
            self._step,
            self._since,
            self._number,
        )

    def enter(self, phase: int, now: int) -> None:
        self._totals[self.phase] += now - self._since
        _NUMBER.pack_into(self._memory, _AT_TOTALS + 8 * self.phase, self._totals[self.phase])
        self.phase, self._since = phase, now
        self._put()

    def step(self, number: int) -> None:
        self._step = number
        self._put()

    def collective(self, number: int, text: str) -> None:
        start = _AT_RING + number % _RING * _ENTRY
        octets = text.encode(errors="replace")[: _ENTRY - 8]
        _NUMBER.pack_into(self._memory, start, 0)  # not to be read while it changes
        self._memory[start + 8 : start + _ENTRY] = octets.ljust(_ENTRY - 8, b"\0")
        _NUMBER.pack_into(self._memory, start, number)
        self._number = number
        self._put()

    def waits(self, begun: bool, now: int, messages: bool = False) -> None:
        if begun:
            self._began_to_wait = now
        else:
            self._waited += now - self._began_to_wait
            _WAITED.pack_into(self._memory, _AT_WAITED, self._waited)
        self._waits = int(begun) + int(messages)
        self._put()

    def opened(self) -> None:
        _NUMBER.pack_into(self._memory, _AT_OPENED, 1)

    @property
    def mine(self) -> bool:
        """Whether this thread is the one that notes."""
        return threading.get_ident() == self._owner


_page: Page | None = None
_clock: StepClock | None = None
# called with (step, phase) whenever a phase begins: testing.faults
_hook: Callable[[int, str], None] | None = None
_step = 0
_opened = False


def open_page(directory: Path, rank: int) -> None:
    """From now on this process, rank `rank`, notes what it does. Called by its main thread."""
    global _page
    _page = Page(file_of(directory, rank))


def open_clock(clock: StepClock) -> None:
    """From now on this one hears of phases. Where another did, what passed in between is none of
    its steps'.
    """
    global _clock
    if clock is not _clock:
        _clock = clock
        clock.begin()


def opened() -> None:
    """This process has had a process group. Any thread may say so."""
    global _opened
    _opened = True
    if _page is not None:
        _page.opened()


def was_opened() -> bool:
    """Whether it is known that this process has had a process group."""
    return _opened


def on_phase(hook: Callable[[int, str], None] | None) -> None:
    """Have `hook(step, phase)` called as each phase begins; None: nobody."""
    global _hook
    _hook = hook


def noted() -> bool:
    """Whether anybody looks: what is costly to say need not be said otherwise."""
    return _page is not None


def enter(phase: str) -> str:
    """A phase begins; gives the one that it ends."""
    before = _enter(INDEX[phase])
    if _hook is not None:
        _hook(_step, phase)
    return PHASES[before]


def _enter(phase: int) -> int:
    now = time.monotonic_ns()
    page, clock, before = _page, _clock, INDEX["loop"]
    if clock is not None and clock.mine:
        before = clock.phase
        clock.enter(phase, now)
    if page is not None and page.mine:
        before = page.phase
        page.enter(phase, now)
    return before


@contextmanager
def inside(phase: str) -> Iterator[None]:
    """A phase within another. An exception that leaves it leaves it noted: that is where it came
    from.
    """
    before = enter(phase)
    yield
    _enter(INDEX[before])  # goes on: no hook hears of it


def step(number: int) -> None:
    """The optimizer step that is being computed, from 1."""
    global _step
    _step = number
    if _page is not None and _page.mine:
        _page.step(number)


def collective(number: int, text: str) -> None:
    """This rank is about to do `text` as its collective `number` of all ranks."""
    page = _page
    if page is not None and page.mine:
        page.collective(number, text)


def waits(begun: bool, *, messages: bool = False) -> None:
    """It begins, or has ended, to wait for other ranks; for `messages` of them, which are no
    collective.
    """
    now = time.monotonic_ns()
    page, clock = _page, _clock
    if page is not None and page.mine:
        page.waits(begun, now, messages)
    if clock is not None and clock.mine:
        clock.waits(begun, now)


@dataclass(frozen=True, slots=True)
class View:
    """A page as somebody else reads it."""

    ticks: int
    phase: str
    step: int
    """That is being computed, from 1; 0 before the first."""
    since_ns: int
    """When the phase began, on the host's monotonic clock."""
    number: int
    """Of the latest collective of all ranks."""
    waits: bool
    """Whether it waits for other ranks."""
    waited_ns: int
    totals_ns: Mapping[str, int]
    """Spent in each phase, but for the one that is going on."""
    collectives: Mapping[int, str]
    """The last ones, in words."""
    messages: bool = False
    """It waits for messages of other ranks, and in no collective."""
    opened: bool = False
    """It has had a process group."""


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.page"


def read_ticks(file: Path) -> int | None:
    """Whether something was noted since: a number that grows. None where there is no page yet."""
    try:
        with file.open("rb", buffering=0) as stream:
            octets = stream.read(_TICKS.size)
    except OSError:
        return None
    return int(_TICKS.unpack(octets)[0]) if len(octets) == _TICKS.size else None


def read(file: Path) -> View | None:
    """What stands on a page; None where there is none yet."""
    try:
        octets = file.read_bytes()
    except OSError:
        return None
    if len(octets) < _SIZE:
        return None
    ticks, phase, waiting, number_of_step, since, number = _STATE.unpack_from(octets)
    if phase >= len(PHASES):
        return None
    collectives = {}
    for start in range(_AT_RING, _SIZE, _ENTRY):
        (each,) = _NUMBER.unpack_from(octets, start)
        if each:
            collectives[each] = (
                octets[start + 8 : start + _ENTRY].rstrip(b"\0").decode(errors="replace")
            )
    return View(
        ticks=ticks,
        phase=PHASES[phase],
        step=number_of_step,
        since_ns=since,
        number=number,
        waits=bool(waiting),
        waited_ns=_WAITED.unpack_from(octets, _AT_WAITED)[0],
        totals_ns=dict(zip(PHASES, _TOTALS.unpack_from(octets, _AT_TOTALS), strict=True)),
        collectives=collectives,
        messages=waiting == 2,
        opened=bool(_NUMBER.unpack_from(octets, _AT_OPENED)[0]),
    )
