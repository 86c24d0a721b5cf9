"""What this rank is doing, in a page of memory that is mapped to a file. Its launcher reads the
page without asking the rank, even if the rank hangs or is dead.

    page    one block of fixed fields (step, phase, since when, latest collective, ...) and a ring
            of the last collectives in words
    phase   start, data, forward, backward, reduce, optimizer, checks, checkpoint, evaluate; "loop"
            is the user's code between steps; "end": the program is over

Without Lockstep's launcher there is no page. The clock of a training's steps (step_clock.py) is
told the same. Only the main thread writes: what a library's threads do does not show where a rank
is. No function here takes a lock or may raise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.disk import allocate
from lockstep.runtime.step_clock import INDEX, PHASES, StepClock

_RING = 16
_TEXT = 232  # bytes
_MEMBERS = 128  # bytes: a bit for each of 1,024 ranks
EVERYBODY = bytes(_MEMBERS)
"""The mask that stands for all ranks, as members of a call."""


class _Collective(ctypes.Structure):
    number: int
    text: bytes
    _fields_ = (("number", ctypes.c_uint64), ("text", ctypes.c_char * _TEXT))


class _Fields(ctypes.Structure):
    """The layout of a page. All times are in ns."""

    ticks: int
    """A counter that grows with every entry. If it stops, the rank makes no progress."""
    phase: int
    waits: int
    """1 while it waits in a collective, 2 while it waits for messages, else 0."""
    step: int
    since: int
    """When the phase began, on the monotonic clock."""
    number: int
    """The number of the latest collective."""
    waited: int
    """Total time spent waiting for other ranks."""
    opened: int
    totals: ctypes.Array[ctypes.c_uint64]
    """Total time in each phase."""
    plain: int
    """1 after the rank has called a function of torch.distributed itself."""
    among: ctypes.Array[ctypes.c_uint8]
    """A bit for each rank that the call below waits for. No bit set: all ranks."""
    call: bytes
    """The function of torch.distributed in which the main thread waits, or ""."""
    native: bytes
    """The collective for which the main thread waits in native code, or ""."""
    looked: int
    """When `native` was last found to be up to date; 0 if nothing looks into native code."""
    ring: ctypes.Array[_Collective]
    """The last collectives."""
    _fields_ = (
        ("ticks", ctypes.c_uint64),
        ("phase", ctypes.c_uint32),
        ("waits", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("step", "since", "number", "waited", "opened")),
        ("totals", ctypes.c_uint64 * len(PHASES)),
        ("plain", ctypes.c_uint64),
        ("among", ctypes.c_uint8 * _MEMBERS),
        ("call", ctypes.c_char * _TEXT),
        ("native", ctypes.c_char * _TEXT),
        ("looked", ctypes.c_uint64),
        ("ring", _Collective * _RING),
    )


class Page:
    """This rank's page. Its main thread writes it."""

    def __init__(self, file: Path) -> None:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            allocate(handle, ctypes.sizeof(_Fields), file)
            self.fields = _Fields.from_buffer(mmap.mmap(handle, ctypes.sizeof(_Fields)))
        finally:
            os.close(handle)
        self.thread = threading.get_ident()
        """The thread that writes the page: the main thread."""
        self.began_to_wait = 0
        self.plain = 0
        """Collective numbers that calls of torch.distributed have used."""
        self._ring = list(self.fields.ring)
        self._among = EVERYBODY
        self.fields.phase = INDEX["start"]
        self.fields.since = time.monotonic_ns()
        self.fields.ticks += 1

    @property
    def ticks(self) -> int:
        return self.fields.ticks

    def collective(self, number: int, text: bytes) -> None:
        """Record that this rank is about to do `text`, its collective `number`: of Lockstep's and
        torch's together.
        """
        entry = self._ring[number % _RING]
        entry.number = 0  # marks the entry as unreadable while it changes
        entry.text = text
        entry.number = self.fields.number = number
        self.fields.ticks += 1

    def call(self, text: bytes, among: bytes, numbered: bool) -> None:
        """Record that a torch.distributed function begins. `numbered`: all ranks call it."""
        fields = self.fields
        if numbered:
            self.plain += 1
            self.collective(fields.number + 1, text)
        self._wait_among(among)
        self.began_to_wait = time.monotonic_ns()
        fields.call = text
        fields.plain = 1
        fields.waits = 1
        fields.native = b""  # the earlier native collective is over
        fields.ticks += 1

    def called(self) -> None:
        """Record that the call has ended."""
        fields = self.fields
        now = time.monotonic_ns()
        fields.waited += now - self.began_to_wait
        fields.waits = 0
        fields.call = b""
        fields.since = now
        fields.ticks += 1

    def _wait_among(self, ranks: bytes) -> None:
        if ranks is not self._among:
            ctypes.memmove(self.fields.among, ranks, _MEMBERS)
            self._among = ranks

    def in_native(self, text: bytes, among: bytes = EVERYBODY) -> None:
        """Record that the main thread waits in native code for collective `text`; b"": it does not
        wait. Another thread calls this.
        """
        if not self.fields.waits:
            self._wait_among(among)
            self.fields.native = text

    def looked(self) -> None:
        """Record that what is noted of native code is up to date. Another thread calls this."""
        self.fields.looked = time.monotonic_ns()

    def moved(self) -> None:
        """Record that native code has begun or ended a collective. Another thread calls this."""
        self.fields.native = b""
        self.fields.ticks += 1

    @property
    def waiting(self) -> bool:
        return bool(self.fields.waits)

    def opened(self) -> None:
        self.fields.opened = 1


current = "loop"
"""The phase that was begun last, if somebody is told of phases."""
_page: Page | None = None
_clock: StepClock | None = None
# called with (step, phase) whenever a phase begins; testing.faults sets it
_hook: Callable[[int, str], None] | None = None
_step = 0
_opened = False


def open_page(directory: Path, rank: int) -> None:
    """Open the page of this process, rank `rank`. The main thread calls this."""
    global _page
    _page = Page(file_of(directory, rank))


def open_clock(clock: StepClock) -> None:
    """Report phases to `clock` from now on. If another clock was in use, the time until now belongs
    to no step of `clock`.
    """
    global _clock
    if clock is not _clock:
        _clock = clock
        clock.begin()


def opened() -> None:
    """Record that this process has had a process group. Any thread may call this."""
    global _opened
    _opened = True
    if _page is not None:
        _page.opened()


def was_opened() -> bool:
    """Whether this process is known to have had a process group."""
    return _opened


def on_phase(hook: Callable[[int, str], None] | None) -> None:
    """Have `hook(step, phase)` called when a phase begins; None removes the hook."""
    global _hook
    _hook = hook


def page() -> Page | None:
    """Return this process's page; None without a launcher."""
    return _page


def noted() -> bool:
    """Whether this process has a page. Without one, callers can skip costly descriptions."""
    return _page is not None


def enter(phase: str, *, resumed: bool = False) -> str:
    """Record that a phase begins, and return the name of the phase that it ends. `resumed`: it
    goes on after a phase within it, so the hook is not called.

    It runs a dozen times in a step, so it looks at the time once and calls nothing.
    """
    global current
    now = time.monotonic_ns()
    thread = threading.get_ident()
    index = INDEX[phase]
    before = INDEX["loop"]
    page = _page
    clock = _clock
    if clock is not None and clock.thread == thread:
        before = clock.phase
        clock.spent[before] += now - clock.since
        clock.phase = index
        clock.since = now
        current = phase
        if clock.marks is not None:
            clock.mark(now)
    if page is not None and page.thread == thread:
        fields = page.fields
        before = fields.phase
        fields.totals[before] += now - fields.since
        fields.phase = index
        fields.since = now
        fields.ticks += 1
        current = phase
    if _hook is not None and not resumed:
        _hook(_step, phase)
    return PHASES[before]


class inside:  # takes a third of the time of a generator-based context manager
    """A phase within another phase. If an exception leaves it, this phase stays noted, because the
    exception came from it.
    """

    __slots__ = "_before", "_phase"

    def __init__(self, phase: str) -> None:
        self._phase = phase

    def __enter__(self) -> None:
        self._before = enter(self._phase)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            enter(self._before, resumed=True)


def step(number: int) -> None:
    """Record the number of the optimizer step that is being computed, from 1."""
    global _step
    _step = number
    page = _page
    if page is not None and page.thread == threading.get_ident():
        page.fields.step = number
        page.fields.ticks += 1


def collective(number: int, text: str) -> None:
    """Record that this rank is about to do `text`, its collective `number` of all ranks."""
    page = _page
    if page is not None and page.thread == threading.get_ident():
        page.collective(number + page.plain, text.encode(errors="replace")[:_TEXT])


def waits(begun: bool, *, messages: bool = False) -> None:
    """Record that this rank starts or stops waiting for other ranks. `messages`: it waits for
    messages, not in a collective. An error while waiting leaves it noted, as with `inside`.
    """
    now = time.monotonic_ns()
    thread = threading.get_ident()
    page = _page
    clock = _clock
    if page is not None and page.thread == thread:
        fields = page.fields
        if begun:
            page.began_to_wait = now
        else:
            fields.waited += now - page.began_to_wait
        fields.waits = int(begun) + int(messages)
        fields.ticks += 1
    if clock is not None and clock.thread == thread:
        clock.waits(begun, now)


@dataclass(frozen=True, slots=True)
class View:
    """A page as another process reads it."""

    ticks: int
    phase: str
    step: int
    """The step that is being computed, from 1; 0 before the first."""
    since_ns: int
    """When the phase began, on the host's monotonic clock."""
    number: int
    """The number of the latest collective of all ranks."""
    waits: bool
    """Whether the rank waits for other ranks."""
    waited_ns: int
    totals_ns: Mapping[str, int]
    """Time in each phase, without the current stay in the current phase."""
    collectives: Mapping[int, str]
    """The last collectives in words, by number."""
    messages: bool = False
    """Whether it waits for messages of other ranks, and not in a collective."""
    opened: bool = False
    """Whether it has had a process group."""
    plain: bool = False
    """Whether it has called functions of torch.distributed itself."""
    call: str = ""
    """The torch.distributed call in which it waits, in words. "" if it waits in one of Lockstep's
    collectives, or does not wait.
    """
    among: frozenset[int] = frozenset()
    """The ranks that it waits for in `call`. Empty: all ranks."""
    looked_ns: int = 0
    """When a wait in native code would last have been noted; 0 if nothing looks for one."""


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.page"


def read_ticks(file: Path) -> int | None:
    """Return the page's counter, which grows with every entry. None if there is no page yet."""
    try:
        with file.open("rb", buffering=0) as stream:
            octets = stream.read(8)
    except OSError:
        return None
    if len(octets) < 8:
        return None
    return int.from_bytes(octets, sys.byteorder)


def read(file: Path) -> View | None:
    """Return the content of a page; None if there is none yet."""
    try:
        page = _Fields.from_buffer_copy(file.read_bytes())
    except (OSError, ValueError):  # the page is being created
        return None
    if page.phase >= len(PHASES):
        return None
    return View(
        ticks=page.ticks,
        phase=PHASES[page.phase],
        step=page.step,
        since_ns=page.since,
        number=page.number,
        waits=bool(page.waits or page.native),
        waited_ns=page.waited,
        totals_ns=dict(zip(PHASES, page.totals, strict=True)),
        collectives={
            entry.number: entry.text.decode(errors="replace") for entry in page.ring if entry.number
        },
        messages=page.waits == 2,
        opened=bool(page.opened),
        plain=bool(page.plain),
        call=(page.call if page.waits else page.native).decode(errors="replace"),
        among=frozenset(members(bytes(page.among))),
        looked_ns=page.looked,
    )


def shortened(text: str) -> bytes:
    """Return `text` encoded, and cut to the length that a page holds."""
    return text.encode(errors="replace")[:_TEXT]


def mask(ranks: Iterable[int]) -> bytes:
    """Return the mask of `ranks`, the members of a call. Ranks too high for a mask give the mask of
    all ranks.
    """
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    if bits.bit_length() > 8 * _MEMBERS:
        return EVERYBODY
    return bits.to_bytes(_MEMBERS, "little")


def members(mask: bytes) -> Iterator[int]:
    """Return the ranks of a mask."""
    bits = int.from_bytes(mask, "little")
    return (rank for rank in range(bits.bit_length()) if bits >> rank & 1)


_SHORT_KINDS = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def short_dtype(dtype: object) -> str:
    """Return a short name of a torch dtype: `f32`, `bf16`, `i64`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in _SHORT_KINDS.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
