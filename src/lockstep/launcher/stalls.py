"""Stalls: which rank the others wait for, in which phase, at which line. They are found from
outside, from the ranks' status pages, before any timeout.

quiet          no page has changed. The allowed time is learnt: five times the longest quiet time so
               far, not less than a floor. It is ten times as long in the first step, which compiles
               and warms up, and while all ranks are in a checkpoint. It is unlimited while no rank
               waits for another and all are in the user's own code, before the first step or
               between steps: Lockstep cannot judge that code
who            a rank that waits for others is not to blame. The rest are, above all those that have
               issued the fewest collectives. The collective that they lack is the one after their
               last
plain scripts  a script that uses only torch.distributed has no steps: it is enough that one rank
               waits for another. A rank that uses the processor may still come: it is named, and no
               rank is ended. If all ranks wait, the report names the first collective that differs.
               Whether a rank waits in native code, a thread of the rank finds out: until it has
               looked, the report waits, up to twice the allowed time
several nodes  each node reports what it sees of its own ranks. Once all have reported, the driver
               explains them together, by the same rules. Ranks that progress are slow, and not
               waited for
slow           pages do change, but the others spend their time waiting for one rank. That is a
               warning, and no stall
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary
from typing import TYPE_CHECKING

from lockstep.launcher import processes
from lockstep.launcher.failures import is_users, named
from lockstep.runtime import status
from lockstep.runtime.status import View

if TYPE_CHECKING:
    from lockstep.launcher.stalls_of_nodes import OtherNodes

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
_SILENT = {
    processes.STOPPED: "stopped (SIGSTOP or a debugger)",
    processes.DISK: "waiting for a disk or a network file system",
    processes.DEAD: "dead",
}
_ENDED = "its process has ended, with exit code 0"
_ABSENT = (processes.STOPPED, processes.DEAD, _ENDED)
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WORKS = 0.02  # a rank works if it uses more than this share of a processor, plus this many seconds
_LINES = 12  # lines of a stack
# minimum share of time that the others wait; maximum share that the slow rank waits
_SLOW, _QUICK = 0.3, 0.1


@dataclass(frozen=True, slots=True)
class Sight:
    """What is known of one rank from outside."""

    pid: int
    view: View
    state: str = ""
    """The state of its process: from `processes.state`, or _ENDED."""
    where: str = ""
    """The innermost line of the user's code."""
    stack: str = ""
    activity: str = ""
    """What the rank does there, in a script whose phases are not known."""
    works: bool = False
    """Whether it is in such a script, and uses the processor."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The report of a stall."""

    rank: int
    """The rank that the others wait for; the first, if there are several."""
    message: str
    stack: str
    """The stack of that rank, outermost frame first; "" if it cannot be seen."""
    works: bool = False
    """Whether the rank may still come: then Lockstep ends no rank."""


class Watcher:
    """Watches the pages of ranks that were started together. `look` is called some twenty times a
    second and costs a few small reads.
    """

    def __init__(
        self,
        directory: Path,
        floor: float = FLOOR,
        clock: Callable[[], float] = time.monotonic,
        elsewhere: OtherNodes | None = None,
    ) -> None:
        """`elsewhere`: the ranks of other hosts. With it, this object reports its ranks there and
        explains nothing.
        """
        self._directory = directory
        self._floor = floor
        self._clock = clock
        self._elsewhere = elsewhere
        self._pids: dict[int, int] = {}  # also of ranks that have ended
        # when it was read, and processor seconds by rank
        self._used: tuple[float, dict[int, float]] | None = None
        self._ticks: dict[int, int] = {}
        self._changed = clock()
        self._longest = 0.0  # longest quiet time that was no stall
        self._quiet = 0.0  # present quiet time, if it can be learnt from
        self._told = False
        self._warned = False  # of what may still be no stall
        self._worked = False  # whether the rank that was reported used the processor
        self._slow = Slowness(floor)

    def look(self, pids: Mapping[int, int]) -> Stall | None:
        """Return a stall, once, if there is one. `pids` are the living ranks' pids, by rank."""
        ticks = {
            rank: found
            for rank in pids
            if (found := status.read_ticks(status.file_of(self._directory, rank))) is not None
        }
        now = self._clock()
        self._pids.update(pids)
        if ticks != self._ticks or not ticks:
            if not self._told:
                self._longest = max(self._longest, self._quiet)
            elif self._worked:
                self._longest = max(self._longest, now - self._changed)
            elif self._elsewhere is not None:
                self._elsewhere.moving()
            self._ticks, self._changed, self._told, self._quiet = ticks, now, False, 0.0
            self._used, self._warned = None, False
            return None
        quiet = now - self._changed
        if self._told or quiet <= self._longest:
            return None
        if self._used is None and quiet > self._floor / 2:
            self._used = now, {rank: processes.cpu_seconds(pid) for rank, pid in pids.items()}
        # no leniency for ranks that another node waits for
        asked = self._elsewhere is not None and self._elsewhere.asked
        times = 1 if asked else self._lenience(pids)
        if times == 1:
            self._quiet = quiet
        usual = max(self._floor, _LEARNT * self._longest)
        if quiet < usual:
            return None
        if quiet < times * usual:
            return self._early(pids, quiet, times * usual) if times == _LENIENT else None
        self._told = True
        sights = self._sights(pids)
        if self._elsewhere is None:
            stall = explain(sights, quiet)
            self._worked = stall is not None and stall.works
            return stall
        self._elsewhere.tell(sights, quiet)
        return None

    def _early(self, pids: Mapping[int, int], quiet: float, limit: float) -> Stall | None:
        """Report, once, ranks that wait where Lockstep is patient: no rank is ended yet."""
        if self._warned or self._elsewhere is not None:
            return None
        self._warned = True
        stall = self.present(pids)
        if stall is None or not any(view.waits for view in self._views(pids).values()):
            return None
        message = f"{stall.message} Lockstep waits up to {limit:.0f} s here."
        return replace(stall, message=message, works=True)

    def present(self, pids: Mapping[int, int]) -> Stall | None:
        """Explain where the ranks are, as if it were a stall; None if one moved a second ago."""
        quiet = self._clock() - self._changed
        return None if quiet < 1 else explain(self._sights(pids), quiet)

    def slow(self, pids: Mapping[int, int]) -> str | None:
        """Return a sentence about a rank that the others wait for most of the time, once for each
        rank.
        """
        now = self._clock()
        if len(pids) < 2 or not self._slow.due(now):
            return None
        return self._slow.look(self._views(pids), now)

    def _views(self, pids: Mapping[int, int]) -> dict[int, View]:
        """Return the pages of the ranks that have one by now."""
        return {
            rank: view
            for rank in pids
            if (view := status.read(status.file_of(self._directory, rank))) is not None
        }

    def _lenience(self, pids: Mapping[int, int]) -> float:
        """Return the factor by which the present activity may take longer than usual."""
        views = list(self._views(pids).values())
        if not any(view.waits for view in views):
            if all(view.phase in _USERS for view in views):
                states = map(processes.state, pids.values())
                return _LENIENT if processes.STOPPED in states else math.inf
            if all(view.phase in (*_USERS, "checkpoint") for view in views):
                return _LENIENT
        elif any(view.plain for view in views) and not any(view.step for view in views):
            if any(view.call.startswith("init_process_group") for view in views):
                return _LENIENT if len(pids) == len(self._pids) else 1
            # on a busy host a rank may wait in native code, and nothing has looked there yet
            late = 1e9 * self._changed
            return 2 if any(0 < view.looked_ns < late and not view.waits for view in views) else 1
        # with an asynchronous server, ranks that wait may be steps behind
        furthest = max((view.step for view in views), default=0)
        step = min((view.step for view in views if not view.waits), default=furthest)
        return _LENIENT if step < 2 else 1

    def _sights(self, pids: Mapping[int, int]) -> dict[int, Sight]:
        found = {
            rank: Sight(pids[rank], view, processes.state(pids[rank]))
            for rank, view in self._views(pids).items()
        }
        plain = any(sight.view.plain for sight in found.values())
        if plain:
            gone = self._views({rank: 0 for rank in self._pids if rank not in pids})
            found.update(
                (rank, Sight(self._pids[rank], view, _ENDED))
                for rank, view in gone.items()
                if view.phase == "end"
            )
        for rank in suspects(found):
            found[rank] = self._seen(rank, found[rank], plain)
        return found

    def _seen(self, rank: int, sight: Sight, plain: bool) -> Sight:
        """Add to `sight` what the rank does. `plain`: some rank calls torch.distributed itself."""
        if sight.state in (*_SILENT, _ENDED):
            return sight
        activity, works = "", False
        if plain and sight.view.phase == "start":
            activity = processes.activity(sight.pid)
            before, used = self._used or (0, {})
            spent = processes.cpu_seconds(sight.pid) - used.get(rank, math.inf)
            # on a busy host a rank may be ready to run, and get little of a processor
            ready = activity == "running"
            works = ready or spent > _WORKS * (1 + self._clock() - before)
        frames = self._frames(sight.pid, stack_of(self._directory, rank))
        where = processes.users_line(frames)
        if sight.view.phase == "data" or any(_LOADER in frame.filename for frame in frames):
            activity = activity and "in the loader"
            # the rank may wait for a loader worker, which runs the user's code
            for child in processes.children(sight.pid):
                # a worker of torch's own loader inherits its rank's handler, and writes to its
                # rank's file
                file = stack_of(self._directory, rank, child)
                own = file if file.exists() else stack_of(self._directory, rank)
                theirs = self._frames(child, own)
                if any(is_users(frame.filename) for frame in theirs):
                    frames = theirs
                    where = f"{processes.users_line(theirs)} (loader worker, pid {child})"
                    break
                if processes.state(child) == processes.STOPPED:
                    where = f"its loader worker (pid {child}) is {_SILENT[processes.STOPPED]}"
                    break
        stack = processes.shown(frames[-_LINES:]).rstrip()
        return replace(sight, where=where, stack=stack, activity=activity, works=works)

    def _frames(self, pid: int, file: Path) -> list[FrameSummary]:
        return processes.main_thread(processes.ask_for_stack(pid, file))


def stack_of(directory: Path, rank: int, worker: int | None = None) -> Path:
    """Return the file to which a rank, or one of its loader workers, writes its stack if asked."""
    return directory / f"rank-{rank}{'' if worker is None else f'.worker-{worker}'}.now"


def suspects(sights: Mapping[int, Sight]) -> list[int]:
    """Return the ranks that the others wait for: of the ranks that do not wait themselves, those
    that have issued the fewest collectives. If all wait, in different collectives: the smallest
    group of ranks in the same one.
    """
    waiting = [rank for rank, sight in sights.items() if _waits(sight)]
    awaited = {each for rank in waiting for each in sights[rank].view.among or sights}
    among = [
        rank
        for rank, sight in sights.items()
        if not _waits(sight) and (rank in awaited or not waiting)
    ]
    if not among:
        if (found := _apart(sights)) is not None:
            return min(found[1].values(), key=len)
        among = list(sights)
    if not waiting:
        # no rank waits, so none misses a rank whose program is over
        among = [rank for rank in among if sights[rank].view.phase != "end"] or among
    # prefer ranks that are stopped or dead: no other rank can have held them up
    among = [rank for rank in among if sights[rank].state in _ABSENT] or among
    least = min((sights[rank].view.number for rank in among), default=0)
    return [rank for rank in sorted(among) if sights[rank].view.number == least]


def _waits(sight: Sight) -> bool:
    return sight.view.waits and sight.state not in _ABSENT


def _apart(sights: Mapping[int, Sight]) -> tuple[int, Mapping[str, list[int]]] | None:
    """If all ranks wait: return the number of the first collective that differs, and the ranks by
    what they call there. If no number differs: 0, and the ranks by where they wait: torch's
    collectives and Lockstep's never meet. None if that is equal too.
    """
    if not any(sight.view.plain for sight in sights.values()):
        return None
    views = {rank: sights[rank].view for rank in sorted(sights)}
    numbers = sorted({number for view in views.values() for number in view.collectives})
    for number in (*numbers, 0):
        said: dict[str, list[int]] = {}
        for rank, view in views.items():
            text = view.collectives.get(number) if number else _place(view)
            if text is not None:
                said.setdefault(text, []).append(rank)
        if len({text.rsplit(" at ", 1)[0] for text in said}) > 1:
            return number, said
    said = {}
    for rank, view in views.items():
        whose = "torch.distributed" if view.call else "lockstep.collectives"
        said.setdefault(f"{_place(view)}, of {whose}", []).append(rank)
    return (0, said) if len({bool(view.call) for view in views.values()}) > 1 else None


def difference(directory: Path, ranks: Iterable[int]) -> str:
    """Return a sentence on the collectives that these ranks were last in, if they are not the same:
    gloo ends a process (SIGABRT) whose partner sends another number of bytes. "" if they are.
    """
    files = {rank: status.file_of(directory, rank) for rank in ranks}
    sights = {
        rank: Sight(0, view)
        for rank, file in files.items()
        if (view := status.read(file)) is not None
    }
    if (apart := _apart(sights)) is None:
        return ""
    who = "; ".join(f"{named(ranks)} {text}" for text, ranks in apart[1].items())
    return f"the ranks were not in the same collective: {who}"


def _place(view: View) -> str:
    """Return where a rank waits: "in #8 (all_reduce sum f32[9] at train.py:20)"."""
    if view.messages:
        return "for messages of other ranks"
    text = view.call or view.collectives.get(view.number, "")
    numbers = [number for number, each in view.collectives.items() if each == text]
    if not numbers:
        return f"in {text}" if text else f"in #{view.number}"
    return f"in #{max(numbers)} ({text})"


def explain(
    sights: Mapping[int, Sight], quiet: float, nodes: Mapping[int, str] | None = None
) -> Stall | None:
    """Explain a stall from what was seen after `quiet` seconds without any change. Pure.

    `nodes`: the label of each rank's node, if these are the ranks of all nodes.
    """
    if not sights:
        return None
    guilty = suspects(sights)
    first = sights[guilty[0]]
    waiting = [rank for rank in sorted(sights) if rank not in guilty and sights[rank].view.waits]
    step = max(sight.view.step for sight in sights.values())
    plain = not step and any(sight.view.plain for sight in sights.values())
    at = "" if plain else f", step {step}"
    apart = _apart(sights) if all(_waits(sights[rank]) for rank in guilty) else None
    if apart is not None:
        parts = _differing(*apart, sights)
    elif waiting:
        parts = _missing(sights, waiting, guilty, at, quiet)
    elif all(sights[rank].view.waits for rank in guilty):
        where = _place(first.view)
        parts = [
            f"all ranks of this host wait {where}{at}: for other hosts, or the network."
            if nodes is None
            else f"all ranks of all nodes wait {where}{at}, which does not end: look at the network."
        ]
    else:
        parts = [f"no rank makes progress{at}."]
        parts += [f"Rank {rank} is {doing(sights[rank], quiet)}." for rank in guilty]
    if nodes is not None and (waiting or not first.view.waits):
        parts.append(f"Rank {guilty[0]} is on {nodes[guilty[0]]}.")
    works = any(sights[rank].works for rank in guilty)
    if works:
        parts.append("It uses the processor and may still finish, so Lockstep only waits.")
    return Stall(guilty[0], " ".join([f"STALL {quiet:.0f} s:", *parts]), first.stack, works)


def _differing(
    number: int, said: Mapping[str, list[int]], sights: Mapping[int, Sight]
) -> list[str]:
    """Return sentences on ranks that wait for each other in different collectives."""
    if not number:
        who = "; ".join(f"{named(ranks)} {text}" for text, ranks in said.items())
        return [f"the ranks wait for each other in different places: {who}."]
    who = "; ".join(f"in {named(ranks)} {text}" for text, ranks in said.items())
    now = {
        rank: place
        for rank, sight in sorted(sights.items())
        if sight.view.waits and not (place := _place(sight.view)).startswith(f"in #{number} ")
    }
    return [
        f"the ranks wait for each other: #{number} is not the same. It is {who}.",
        *(f"Rank {rank} waits {place} now." for rank, place in now.items()),
    ]


def _missing(
    sights: Mapping[int, Sight], waiting: list[int], guilty: list[int], at: str, quiet: float
) -> list[str]:
    """Return sentences on ranks that others wait for."""
    first = sights[guilty[0]].view
    missing, never = _awaited(sights, waiting, first)
    if any(sights[rank].view.plain for rank in waiting):
        places: dict[str, list[int]] = {}
        for rank in waiting:
            places.setdefault(_place(sights[rank].view), []).append(rank)
        if not any(place.startswith(f"in #{missing} ") for place in places):
            never = "is not there:"
    else:
        texts = dict(first.collectives)
        for rank in waiting:
            texts.update(sights[rank].view.collectives)
        where = f"in #{missing} ({texts[missing]})" if missing in texts else f"in #{missing}"
        messages = [rank for rank in waiting if sights[rank].view.messages]
        elsewhere = [rank for rank in waiting if rank not in messages]
        places = {where: elsewhere, "for messages of other ranks": messages}
    who = ", ".join(
        f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {place}"
        for place, ranks in places.items()
        if ranks
    )
    return [
        f"{who}{at}.",
        *(f"Rank {rank} {never} {doing(sights[rank], quiet)}." for rank in guilty),
    ]


def _awaited(sights: Mapping[int, Sight], waiting: list[int], guilty: View) -> tuple[int, str]:
    """Return the number of the collective in which the others wait, and what to say of the rank
    that does not come.
    """
    if all(sights[rank].view.messages for rank in waiting):
        return 0, "does not answer:"
    missing = guilty.number + 1
    if any(missing in sights[rank].view.collectives for rank in waiting):
        return missing, "never issued it:"
    # they have all issued it, and wait for its end
    return guilty.number, "is in the middle of it:" if guilty.number else "has issued none:"


def doing(sight: Sight, quiet: float) -> str:
    """Return what a rank does: "in data, dataset.py:88 read_shard, for 31 s"."""
    if sight.state == _ENDED:
        return _ENDED
    what = _SILENT.get(sight.state)
    parts = [
        what,
        sight.activity or ("" if what and sight.view.plain else DOING[sight.view.phase]),
        sight.where,
        f"for {max(quiet, (time.monotonic_ns() - sight.view.since_ns) / 1e9):.0f} s",
    ]
    return ", ".join(filter(None, parts))


class Slowness:
    """Finds one rank that all others wait for. It looks once in `every` seconds, and judges the
    time since the last look.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._before: Mapping[int, View] = {}
        self._at = 0.0
        self._said: set[int] = set()

    def due(self, now: float) -> bool:
        return now - self._at >= self._every

    def look(self, views: Mapping[int, View], now: float) -> str | None:
        """Compare with the last look. Return None at the first look, and if no rank is slow."""
        before, nanoseconds = self._before, 1e9 * (now - self._at)
        # the time of start-up does not count
        trains = min((view.step for view in views.values()), default=0) > 2
        self._before, self._at = views if trains else {}, now
        if not trains or set(before) != set(views):
            return None
        waited = {
            rank: (view.waited_ns - before[rank].waited_ns) / nanoseconds
            for rank, view in views.items()
        }
        slow = min(waited, key=waited.__getitem__)
        others = {rank: share for rank, share in waited.items() if rank != slow}
        if slow in self._said or waited[slow] > _QUICK or min(others.values()) < _SLOW:
            return None
        self._said.add(slow)
        spent = {
            phase: total - before[slow].totals_ns[phase]
            for phase, total in views[slow].totals_ns.items()
        }
        phase = max(spent, key=spent.__getitem__)
        return (
            f"SLOW: {named(others)} {'waits' if len(others) == 1 else 'wait'}"
            f" {100 * sum(others.values()) / len(others):.0f} % of the time for rank {slow}, which"
            f" is alive and spends {100 * spent[phase] / max(1, sum(spent.values())):.0f} % of its"
            f" own time {DOING[phase]}. This warning appears once."
        )
