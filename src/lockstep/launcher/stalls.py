"""Stalls: which rank the others wait for, in which phase, at which line. Seen from outside, before
any timeout, from the ranks' status pages.

quiet          no page has changed. How long that may last is learnt: five times the longest so far,
               not less than a floor. Ten times
               that in the first step, which compiles and warms up, and where all ranks are in a
               checkpoint. For ever, where nobody waits for another rank and all are in the user's
               own code before the first step or between steps: that is not ours to judge
who            a rank that waits for others is not to blame. The rest are, above all those that have
               issued the fewest collectives:
               the first that is missing is the one after their last
several nodes  each node tells what it sees of its own ranks; once all have told, the driver explains
               them together, by the same rules. Ranks that progress are slow, and not waited for
slow           pages do change, but the others spend their time waiting for one rank: that is said,
               and is no stall
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import FrameSummary

from lockstep.launcher import processes
from lockstep.launcher.failures import is_users, named
from lockstep.runtime import status
from lockstep.runtime.status import View

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


class Watcher:
    """Looks at the pages of a generation's ranks. `look` is called some twenty times a second
    and costs a few small reads.
    """

    def __init__(
        self,
        directory: Path,
        floor: float = FLOOR,
        clock: Callable[[], float] = time.monotonic,
        elsewhere: OtherNodes | None = None,
    ) -> None:
        """`elsewhere`: the ranks of other hosts, without which nothing is said of these."""
        self._directory = directory
        self._floor = floor
        self._clock = clock
        self._elsewhere = elsewhere
        self._ticks: dict[int, int] = {}
        self._changed = clock()
        self._longest = 0.0  # quiet time that was none
        self._quiet = 0.0  # that is going on, and can be learnt from
        self._told = False
        self._slow = Slowness(floor)

    def look(self, pids: Mapping[int, int]) -> Stall | None:
        """A stall, once, if there is one. `pids` are those that live, by rank."""
        ticks = {
            rank: found
            for rank in pids
            if (found := status.read_ticks(status.file_of(self._directory, rank))) is not None
        }
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
        # a rank that another node waits for is not left alone
        times = 1 if asked else self._lenience(pids)
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
        return {
            rank: view
            for rank in pids
            if (view := status.read(status.file_of(self._directory, rank))) is not None
        }

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
        found = {
            rank: Sight(pids[rank], view, processes.state(pids[rank]))
            for rank, view in self._views(pids).items()
        }
        for rank in suspects(found):
            found[rank] = self._with_stack(rank, found[rank])
        return found

    def _with_stack(self, rank: int, sight: Sight) -> Sight:
        if sight.state in _SILENT:
            return sight
        frames = self._frames(sight.pid, stack_of(self._directory, rank))
        where = processes.users_line(frames)
        if sight.view.phase == "data":
            # perhaps it waits for a process of its own, which has the user's code
            for child in processes.children(sight.pid):
                theirs = self._frames(child, stack_of(self._directory, rank, child))
                if any(is_users(frame.filename) for frame in theirs):
                    frames = theirs
                    where = f"{processes.users_line(theirs)} (loader worker, pid {child})"
                    break
                if processes.state(child) == processes.STOPPED:
                    where = f"its loader worker (pid {child}) is {_SILENT[processes.STOPPED]}"
                    break
        return replace(sight, where=where, stack=processes.shown(frames[-_LINES:]).rstrip())

    def _frames(self, pid: int, file: Path) -> list[FrameSummary]:
        return processes.main_thread(processes.ask_for_stack(pid, file))


def stack_of(directory: Path, rank: int, worker: int | None = None) -> Path:
    """Where a rank, or a loader worker of it, writes its stack when it is asked to."""
    return directory / f"rank-{rank}{'' if worker is None else f'.worker-{worker}'}.now"


def suspects(sights: Mapping[int, Sight]) -> list[int]:
    """The ranks that are waited for: of those that do not wait themselves, the ones that have
    issued the fewest collectives.
    """
    among = [
        rank
        for rank, sight in sights.items()
        if not sight.view.waits or sight.state in (processes.STOPPED, processes.DEAD)
    ] or list(sights)
    if not any(sight.view.waits for sight in sights.values()):
        # then nobody misses one whose program is over
        among = [rank for rank in among if sights[rank].view.phase != "end"] or among
    least = min((sights[rank].view.number for rank in among), default=0)
    return [rank for rank in sorted(among) if sights[rank].view.number == least]


def explain(
    sights: Mapping[int, Sight], quiet: float, nodes: Mapping[int, str] | None = None
) -> Stall | None:
    """The sentences, from what was seen after `quiet` seconds without any change. Pure.

    `nodes`: these are the ranks of all nodes; the label of each one's.
    """
    if not sights:
        return None
    guilty = suspects(sights)
    first = sights[guilty[0]]
    waiting = [rank for rank in sorted(sights) if rank not in guilty and sights[rank].view.waits]
    elsewhere = not waiting and all(sights[rank].view.waits for rank in guilty)
    step = max(sight.view.step for sight in sights.values())
    never = "is"
    missing = first.view.number
    if waiting:
        missing, never = _awaited(sights, waiting, first.view)
    texts = {
        **first.view.collectives,
        **{
            number: text
            for rank in waiting
            for number, text in sights[rank].view.collectives.items()
        },
    }
    where = f"in #{missing} ({texts[missing]})" if missing in texts else f"in #{missing}"
    if all(sights[rank].view.messages for rank in waiting or guilty):
        where = "for messages of other ranks"
    if waiting:
        parts = [
            f"{named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} {where}, step {step}."
        ]
    elif elsewhere and nodes is None:
        parts = [
            f"all ranks of this host wait {where}, step {step}: for other hosts, or the network."
        ]
    elif elsewhere:
        parts = [
            f"all ranks of all nodes wait {where}, step {step}, which does not end: look at the"
            " network."
        ]
    else:
        parts = [f"no rank gets on, step {step}."]
    if not elsewhere:
        parts += [f"Rank {rank} {never} {doing(sights[rank], quiet)}." for rank in guilty]
        parts += [] if nodes is None else [f"Rank {guilty[0]} is on {nodes[guilty[0]]}."]
    return Stall(guilty[0], " ".join([f"STALL {quiet:.0f} s:", *parts]), first.stack)


def _awaited(sights: Mapping[int, Sight], waiting: list[int], guilty: View) -> tuple[int, str]:
    """The number of the collective in which the others wait, and what to say of who does not
    come.
    """
    if all(sights[rank].view.messages for rank in waiting):
        return 0, "does not answer:"
    missing = guilty.number + 1
    if any(missing in sights[rank].view.collectives for rank in waiting):
        return missing, "never issued it:"
    # they have all issued it, and wait for its end
    return guilty.number, "is in the middle of it:" if guilty.number else "has issued none:"


def doing(sight: Sight, quiet: float, now_ns: int | None = None) -> str:
    """ "in data, dataset.py:88 read_shard, for 31 s" """
    now = time.monotonic_ns() if now_ns is None else now_ns
    what = _SILENT.get(sight.state)
    parts = [
        what,
        DOING[sight.view.phase],
        sight.where,
        f"for {max(quiet, (now - sight.view.since_ns) / 1e9):.0f} s",
    ]
    return ", ".join(filter(None, parts))


class Slowness:
    """Is one rank what the others wait for? Looked at once in so many seconds, over what they
    did since.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._before: Mapping[int, View] = {}
        self._at = 0.0
        self._said: set[int] = set()

    def due(self, now: float) -> bool:
        return now - self._at >= self._every

    def look(self, views: Mapping[int, View], now: float) -> str | None:
        """Compare with the last look. None at the first, and where nobody is slow."""
        before, nanoseconds = self._before, 1e9 * (now - self._at)
        # what start-up took is nobody's fault
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
            f" own {DOING[phase]}. This is said once."
        )


@dataclass(frozen=True, slots=True)
class Quiet:
    """What a node tells of its ranks when none of them has progressed for `seconds`. Times are
    on its own clock.
    """

    seconds: float
    sights: Mapping[int, Sight]
    now_ns: int


class QuietNodes:
    """What the nodes have told of the ranks that were started together, by their ids."""

    def __init__(self) -> None:
        self._told: dict[str, Quiet] = {}
        self._explained = False

    def quiet(self, node: str, told: Quiet) -> bool:
        """Whether it is the first, so that the other nodes are to be asked."""
        first = not self._told
        shift = time.monotonic_ns() - told.now_ns
        self._told[node] = replace(
            told,
            sights={
                rank: replace(sight, view=replace(sight.view, since_ns=sight.view.since_ns + shift))
                for rank, sight in told.sights.items()
            },
        )
        return first

    def moving(self, node: str) -> None:
        self._told.pop(node, None)
        self._explained = False

    def verdict(self, labels: Mapping[str, str]) -> Stall | None:
        """Once all nodes (`labels`, by id) have told, once."""
        if self._explained or not labels or set(labels) - set(self._told):
            return None
        self._explained = True
        told = {node: self._told[node] for node in labels}
        sights = {rank: sight for quiet in told.values() for rank, sight in quiet.sights.items()}
        nodes = {rank: labels[node] for node, quiet in told.items() for rank in quiet.sights}
        return explain(sights, max(quiet.seconds for quiet in told.values()), nodes)


class OtherNodes:
    """A node's end: what it tells the driver (`send`), and what it has heard. `Watcher` tells it, and
    asks it.
    """

    def __init__(self, send: Callable[[str, object], None]) -> None:
        self._send = send
        self._asked = False
        self._verdict: Stall | None = None

    def note(self, verdict: Stall | None) -> None:
        """The driver asks, or has explained. Called in the thread that reads from it."""
        self._asked = self._asked or verdict is None
        self._verdict = verdict or self._verdict

    def asked(self) -> bool:
        return self._asked

    def tell(self, sights: Mapping[int, Sight], quiet: float) -> None:
        self._send("quiet", Quiet(quiet, sights, time.monotonic_ns()))

    def moving(self) -> None:
        self._asked = False
        self._send("moving", None)

    def verdict(self) -> Stall | None:
        found, self._verdict = self._verdict, None
        return found
