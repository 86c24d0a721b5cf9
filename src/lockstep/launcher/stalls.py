"""Nobody gets on: who is waited for, in which phase, at which line. Seen from outside, before any timeout, from the ranks' status pages.

quiet          no page has changed. How long that may last is learnt: five times the longest so far, not less than a floor. Ten times
               that in the first step, which compiles and warms up, and where all ranks are in a checkpoint. For ever, where nobody waits
               for another rank and all are in the user's own code before the first step or between steps: that is not ours to judge
who            a rank that waits for others is not to blame. The rest are, above all those that have issued the fewest collectives:
               the first that is missing is the one after their last
slow           pages do change, but the others spend their time waiting for one rank: that is said, and is no stall
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep import status
from lockstep.launcher import processes
from lockstep.launcher.failures import is_users, named
from lockstep.status import View

FLOOR = 30.0  # seconds
_LEARNT, _LENIENT = 5, 10
_USERS = ("start", "loop", "end")
DOING = {
    "start": "starting",
    "data": "in data",
    "forward": "in forward",
    "backward": "in backward",
    "reduce": "in reduce",
    "optimizer": "in the optimizer",
    "checkpoint": "in a checkpoint",
    "evaluate": "in evaluation",
    "loop": "between steps",
    "checks": "in a check that the ranks agree",
    "end": "at the end of its program",
}
_LINES = 12  # of a stack
_SLOW, _QUICK = 0.3, 0.1  # shares of the time that the others wait, and the slow one


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of one rank from outside."""

    pid: int
    view: View
    state: str = ""
    """As the system has it: processes.state."""
    where: str = ""
    """The innermost line of its own code."""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """What is said of it."""

    rank: int
    """That is waited for; the first of them."""
    message: str
    stack: str
    """Where that rank is, outermost first; "" where it cannot be seen."""
    elsewhere: bool = False
    """All ranks of this host wait: for another, or the network."""


class Elsewhere(Protocol):
    """The other hosts of a generation, whose ranks these wait for, or the other way round."""

    def asked(self) -> bool:
        """Whether ranks of another host do not get on, so that these are to be told of."""
        ...

    def tell(self, sights: Mapping[int, Sight], quiet: float) -> None:
        """These have not got on for so many seconds."""
        ...

    def moving(self) -> None:
        """They do again."""
        ...

    def verdict(self) -> Stall | None:
        """What follows from what all hosts have told, once."""
        ...


class Watcher:
    """Looks at the pages of a generation's ranks. `look` is called some twenty times a second and costs a few small reads."""

    def __init__(
        self, directory: Path, floor: float = FLOOR, clock: Callable[[], float] = time.monotonic, elsewhere: Elsewhere | None = None
    ) -> None:
        """`elsewhere`: the ranks of other hosts, without which nothing is said of these."""
        self._directory, self._floor, self._clock, self._elsewhere = directory, floor, clock, elsewhere
        self._ticks: dict[int, int] = {}
        self._changed = clock()
        self._longest = 0.0  # quiet time that was none
        self._quiet = 0.0  # that is going on, and can be learnt from
        self._told = False
        self._slow = Slowness(floor)

    def look(self, pids: Mapping[int, int]) -> Stall | None:
        """A stall, once, if there is one. `pids` are those that live, by rank."""
        ticks = {rank: found for rank in pids if (found := status.read_ticks(status.file_of(self._directory, rank))) is not None}
        now = self._clock()
        if ticks != self._ticks or not ticks:
            if not self._told:
                self._longest = max(self._longest, self._quiet)
            elif self._elsewhere is not None:
                self._elsewhere.moving()
            self._ticks, self._changed, self._told, self._quiet = ticks, now, False, 0.0
            return None
        quiet = now - self._changed
        if self._told or quiet <= self._longest:
            return None
        asked = self._elsewhere is not None and self._elsewhere.asked()
        times = 1 if asked else self._lenience(pids)  # who is waited for elsewhere is not left alone
        if times == 1:
            self._quiet = quiet
        if quiet < times * max(self._floor, _LEARNT * self._longest):
            return None
        self._told = True
        sights = self._sights(pids)
        if self._elsewhere is None:
            return explain(sights, quiet)
        self._elsewhere.tell(sights, quiet)
        return None

    def slow(self, pids: Mapping[int, int]) -> str | None:
        """A sentence about a rank that the others wait for most of the time, once for each."""
        now = self._clock()
        if len(pids) < 2 or not self._slow.due(now):
            return None
        return self._slow.look(self._views(pids), now)

    def _views(self, pids: Mapping[int, int]) -> dict[int, View]:
        """Of those that have a page by now."""
        return {rank: view for rank in pids if (view := status.read(status.file_of(self._directory, rank))) is not None}

    def _lenience(self, pids: Mapping[int, int]) -> float:
        """How many times as long as otherwise what goes on may take."""
        views = list(self._views(pids).values())
        if not any(view.waits for view in views):
            if all(view.phase in _USERS for view in views):
                return math.inf
            if all(view.phase in (*_USERS, "checkpoint") for view in views):
                return _LENIENT
        return _LENIENT if min((view.step for view in views), default=0) < 2 else 1

    def _sights(self, pids: Mapping[int, int]) -> dict[int, Sight]:
        found = {rank: Sight(pids[rank], view, processes.state(pids[rank])) for rank, view in self._views(pids).items()}
        for rank in suspects(found):
            found[rank] = self._with_stack(rank, found[rank])
        return found

    def _with_stack(self, rank: int, sight: Sight) -> Sight:
        if sight.state in ("T", "D", "Z"):
            return sight  # it cannot answer
        frames = processes.main_thread(processes.ask_for_stack(sight.pid, stack_of(self._directory, rank)))
        where = processes.users_line(frames)
        if sight.view.phase == "data":  # perhaps it waits for a process of its own, which has the user's code
            for child in processes.children(sight.pid):
                file = stack_of(self._directory, rank, child)
                theirs = processes.main_thread(processes.ask_for_stack(child, file)) if file.exists() else []
                if any(map(is_users, (frame[0] for frame in theirs))):
                    frames, where = theirs, f"{processes.users_line(theirs)} (loader worker, pid {child})"
                    break
                if processes.state(child) == "T":
                    where = f"its loader worker (pid {child}) is stopped (SIGSTOP or a debugger)"
                    break
        return Sight(sight.pid, sight.view, sight.state, where, _shown(frames))


def _shown(frames: list[tuple[str, int, str]]) -> str:
    """Outermost first, from the first frame of the user's own code on; of many the innermost."""
    ordered = frames[::-1]
    first = next((place for place, frame in enumerate(ordered) if is_users(frame[0])), 0)
    return "\n".join(f'  File "{file}", line {line}, in {function}' for file, line, function in ordered[first:][-_LINES:])


def stack_of(directory: Path, rank: int, worker: int | None = None) -> Path:
    """Where a rank, or a loader worker of it, writes its stack when it is asked to."""
    return directory / f"rank-{rank}{'' if worker is None else f'.worker-{worker}'}.now"


def suspects(sights: Mapping[int, Sight]) -> list[int]:
    """The ranks that are waited for: of those that do not wait themselves, the ones that have issued the fewest collectives."""
    among = [rank for rank, sight in sights.items() if not sight.view.waits or sight.state in ("T", "Z")] or list(sights)
    if not any(sight.view.waits for sight in sights.values()):  # then nobody misses one whose program is over
        among = [rank for rank in among if sights[rank].view.phase != "end"] or among
    least = min((sights[rank].view.number for rank in among), default=0)
    return [rank for rank in sorted(among) if sights[rank].view.number == least]


def explain(sights: Mapping[int, Sight], quiet: float) -> Stall | None:
    """The sentences, from what was seen after `quiet` seconds without any change. Pure."""
    if not sights:
        return None
    guilty = suspects(sights)
    waiting = [rank for rank in sorted(sights) if rank not in guilty and sights[rank].view.waits]
    first = sights[guilty[0]]
    step = max(sight.view.step for sight in sights.values())
    parts, elsewhere = [f"STALL {quiet:.0f} s:"], False
    if waiting:
        missing, text, never = _awaited(sights, waiting, first.view)
        where = "for messages of other ranks" if missing is None else f"in #{missing}{f' ({text})' if text else ''}"
        parts.append(f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} {where}, step {step}.")
        parts += [f"{_capital(named([rank]))} {never} {doing(sights[rank], quiet)}." for rank in guilty]
    elif elsewhere := all(sights[rank].view.waits for rank in guilty):
        text = first.view.collectives.get(first.view.number, "")
        where = "for messages of other ranks" if first.view.messages else f"in #{first.view.number}{f' ({text})' if text else ''}"
        parts.append(f"all ranks of this host wait {where}, step {step}: for other hosts, or the network.")
    else:
        parts.append(f"no rank gets on, step {step}.")
        parts += [f"{_capital(named([rank]))} is {doing(sights[rank], quiet)}." for rank in guilty]
    return Stall(guilty[0], " ".join(parts), first.stack, elsewhere)


def _awaited(sights: Mapping[int, Sight], waiting: list[int], guilty: View) -> tuple[int | None, str, str]:
    """The number and the words of the collective in which the others wait (None: in no collective), and what to say of who does not come."""
    if all(sights[rank].view.messages for rank in waiting):
        return None, "", "does not answer:"
    missing = guilty.number + 1
    for rank in waiting:
        if missing in sights[rank].view.collectives:
            return missing, sights[rank].view.collectives[missing], "never issued it:"
    # they have all issued it, and wait for its end
    return guilty.number, guilty.collectives.get(guilty.number, ""), "is in the middle of it:" if guilty.number else "has issued none:"


def doing(sight: Sight, quiet: float, now_ns: int | None = None) -> str:
    """ "in data, dataset.py:88 read_shard, for 31 s" """
    now = time.monotonic_ns() if now_ns is None else now_ns
    what = {
        "T": "stopped (SIGSTOP or a debugger)",
        "D": "waiting for a disk or a network file system",
        "Z": "dead",
    }.get(sight.state)
    parts = [what, DOING[sight.view.phase], sight.where, f"for {max(quiet, (now - sight.view.since_ns) / 1e9):.0f} s"]
    return ", ".join(part for part in parts if part)


class Slowness:
    """Is one rank what the others wait for? Looked at once in so many seconds, over what they did since."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._before: dict[int, View] = {}
        self._at = 0.0
        self._said: set[int] = set()

    def due(self, now: float) -> bool:
        return now - self._at >= self._every

    def look(self, views: Mapping[int, View], now: float) -> str | None:
        """Compare with the last look. None at the first, and where nobody is slow."""
        before, seconds = self._before, now - self._at
        trains = min((view.step for view in views.values()), default=0) > 2  # what start-up took is nobody's fault
        self._before, self._at = dict(views) if trains else {}, now
        if not trains or set(before) != set(views):
            return None
        waited = {rank: (view.waited_ns - before[rank].waited_ns) / 1e9 / seconds for rank, view in views.items()}
        slow = min(waited, key=lambda rank: waited[rank])
        others = [share for rank, share in waited.items() if rank != slow]
        if slow in self._said or waited[slow] > _QUICK or min(others) < _SLOW:
            return None
        self._said.add(slow)
        spent = {phase: views[slow].totals_ns[phase] - before[slow].totals_ns[phase] for phase in views[slow].totals_ns}
        phase = max(spent, key=lambda name: spent[name])
        share = spent[phase] / max(1, sum(spent.values()))
        who = named([rank for rank in sorted(views) if rank != slow])
        verb = "waits" if len(others) == 1 else "wait"
        return (
            f"SLOW: {who} {verb} {100 * sum(others) / len(others):.0f} % of the time for rank {slow}, which is alive and spends "
            f"{100 * share:.0f} % of its own {DOING[phase]}. This is said once."
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
