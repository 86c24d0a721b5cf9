"""Stalls: which rank the others wait for, in which phase, at which line. They are found from
outside, from the ranks' status pages, before any timeout.

quiet          no page has changed. The allowed time is learnt: five times the longest quiet time so
               far, not less than a floor. It is ten times as long in the first step, which compiles
               and warms up, and while all ranks are in a checkpoint. It is unlimited while no rank
               waits for another and all are in the user's own code, before the first step or
               between steps: Lockstep cannot judge that code
plain scripts  a script that uses only torch.distributed has no steps: it is enough that one rank
               waits for another. A rank that uses the processor may still come: it is named, and no
               rank is ended. Whether a rank waits in native code, a thread of the rank finds out:
               until it has looked, the report waits, up to twice the allowed time
several nodes  each node reports what it sees of its own ranks. Once all have reported, the driver
               explains them together, by the same rules (stall_report.py)
slow           pages do change, but the others spend their time waiting for one rank. That is a
               warning, and no stall
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

from lockstep.launcher.failures import named
from lockstep.launcher.stall_report import (
    DOING,
    ENDED,
    SILENT,
    RankSnapshot,
    Stall,
    explain,
    suspects,
    views_of,
)
from lockstep.launcher.stalls_of_nodes import OtherNodes
from lockstep.runtime import processes, status
from lockstep.runtime.failure_record import is_users
from lockstep.runtime.processes import Pids
from lockstep.runtime.status import View

FLOOR = 30.0  # seconds
_LOOKS = 100  # at the pages, in the allowed time
_LEARNT = 5
_LENIENT = 10
_USERS = ("start", "loop", "end")
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_WORKS = 0.02  # a rank works if it uses more than this share of a processor, plus this many seconds
_LINES = 12  # lines of a stack
_SLOW = 0.3  # minimum share of time that the others wait for a slow rank
_QUICK = 0.1  # maximum share of time that the slow rank itself waits


class Watcher:
    """Watches the pages of ranks that were started together. `look` may be called at any rate: it
    reads the pages a hundred times in the floor of the allowed time.
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
        self._other_nodes = elsewhere
        self._pids: dict[int, int] = {}  # also of ranks that have ended
        self._cpu_seconds: dict[int, float] = {}  # by pid, at `_sampled`; empty before
        self._sampled = 0.0
        self._ticks: dict[int, int] = {}
        self._look_at = self._changed = clock()
        # longest quiet time that was no stall; a shorter one than this would change nothing
        self._longest = floor / _LEARNT
        self._quiet = 0.0  # present quiet time, if it can be learnt from
        self._reported = False
        self._warned = False  # of what may still be no stall
        self._worked = False  # whether the rank that was reported used the processor
        self._slow = Slowness(floor)

    def look(self, pids: Pids) -> Stall | None:
        """Return a stall, once, if there is one."""
        now = self._clock()
        if now < self._look_at:
            return None
        self._look_at = now + self._floor / _LOOKS
        ticks = {}
        for rank in pids:
            tick = status.read_ticks(status.file_of(self._directory, rank))
            if tick is not None:
                ticks[rank] = tick
        self._pids.update(pids)
        if ticks != self._ticks or not ticks:
            self._note_progress(now)
            self._ticks = ticks
            return None
        quiet = now - self._changed
        if self._reported or quiet <= self._longest:
            return None
        if not self._cpu_seconds and quiet > self._floor / 2:
            self._cpu_seconds = processes.cpu_seconds(pids.values())
            self._sampled = now
        # no leniency for ranks that another node waits for
        awaited = self._other_nodes is not None and self._other_nodes.waiting
        times = 1 if awaited else self._lenience(pids)
        if times == 1:
            self._quiet = quiet
        usual = _LEARNT * self._longest
        if quiet < usual:
            return None
        if quiet < times * usual:
            return self._warn_early(pids, times * usual) if times == _LENIENT else None
        self._reported = True
        snapshots = self._snapshots(pids)
        if self._other_nodes is None:
            stall = explain(snapshots, quiet)
            self._worked = stall is not None and stall.works
            return stall
        self._other_nodes.report_quiet(snapshots, quiet)
        return None

    def _note_progress(self, now: float) -> None:
        """Learn from a quiet time that has ended, and wait for the next."""
        if not self._reported:
            self._longest = max(self._longest, self._quiet)
        elif self._worked:
            self._longest = max(self._longest, now - self._changed)
        elif self._other_nodes is not None:
            self._other_nodes.report_progress()
        self._changed = now
        self._reported = False
        self._warned = False
        self._quiet = 0.0
        self._cpu_seconds = {}

    def _warn_early(self, pids: Pids, limit: float) -> Stall | None:
        """Report, once, ranks that wait where Lockstep is patient: no rank is ended yet."""
        if self._warned or self._other_nodes is not None:
            return None
        self._warned = True
        stall = self.present(pids)
        waits = [view.waits for view in views_of(self._directory, pids).values()]
        if stall is None or not any(waits):
            return None
        message = f"{stall.message} Lockstep waits up to {limit:.0f} s here."
        return replace(stall, message=message, works=True)

    def present(self, pids: Pids) -> Stall | None:
        """Explain where the ranks are, as if it were a stall; None if one moved a second ago."""
        quiet = self._clock() - self._changed
        return None if quiet < 1 else explain(self._snapshots(pids), quiet)

    def slow(self, pids: Pids) -> str | None:
        """Return a sentence about a rank that the others wait for most of the time, once for each
        rank.
        """
        now = self._clock()
        if len(pids) < 2 or not self._slow.due(now):
            return None
        return self._slow.check(views_of(self._directory, pids), now)

    def _lenience(self, pids: Pids) -> float:
        """Return the factor by which the present activity may take longer than usual."""
        views = views_of(self._directory, pids).values()
        waiting = [view for view in views if view.waits]
        others = [view for view in views if not view.waits]
        if not waiting:
            phases = {view.phase for view in others}
            if phases.issubset(_USERS):
                stopped = processes.STOPPED in map(processes.state, pids.values())
                return _LENIENT if stopped else math.inf
            if phases.issubset((*_USERS, "checkpoint")):
                return _LENIENT
        elif any(view.plain for view in views) and not any(view.step for view in views):
            if any(view.call.startswith("init_process_group") for view in waiting):
                return _LENIENT if len(pids) == len(self._pids) else 1
            # on a busy host a rank may wait in native code, and nothing has looked there yet
            late = 1e9 * self._changed
            return 2 if any(0 < view.looked_ns < late for view in others) else 1
        # with an asynchronous server, ranks that wait may be steps behind
        steps = [view.step for view in others] or [max(view.step for view in waiting)]
        return _LENIENT if min(steps) < 2 else 1

    def _snapshots(self, pids: Pids) -> dict[int, RankSnapshot]:
        snapshots = {}
        for rank, view in views_of(self._directory, pids).items():
            snapshots[rank] = RankSnapshot(pids[rank], view, processes.state(pids[rank]))
        plain = any(snapshot.view.plain for snapshot in snapshots.values())
        if plain:
            for rank, view in views_of(self._directory, self._pids.keys() - pids).items():
                if view.phase == "end":
                    snapshots[rank] = RankSnapshot(self._pids[rank], view, ENDED)
        for rank in suspects(snapshots):
            if snapshots[rank].state not in (*SILENT, ENDED):
                snapshots[rank] = self._inspect(rank, snapshots[rank], plain)
        return snapshots

    def _inspect(self, rank: int, snapshot: RankSnapshot, plain: bool) -> RankSnapshot:
        """Add to a snapshot what the rank does. `plain`: some rank calls torch.distributed itself."""
        pid = snapshot.pid
        activity = ""
        works = False
        if plain and snapshot.view.phase == "start":
            activity = processes.activity(pid)
            works = self._works(pid, activity)
        file = processes.stack_of(self._directory, rank)
        frames = _frames(pid, file)
        line = processes.users_line(frames)
        if snapshot.view.phase == "data" or any(_LOADER in frame.filename for frame in frames):
            activity = activity and "in the loader"
            # the rank may wait for a loader worker, which runs the user's code
            for child in processes.children(pid):
                # a worker of torch's own loader inherits its rank's handler, and writes to its
                # rank's file
                own_file = processes.stack_of(self._directory, rank, child)
                worker_frames = _frames(child, own_file if own_file.exists() else file)
                if any(is_users(frame.filename) for frame in worker_frames):
                    frames = worker_frames
                    line = f"{processes.users_line(frames)} (loader worker, pid {child})"
                    break
                if processes.state(child) == processes.STOPPED:
                    line = f"its loader worker (pid {child}) is {SILENT[processes.STOPPED]}"
                    break
        stack = processes.format_stack(frames[-_LINES:]).rstrip()
        return replace(snapshot, line=line, stack=stack, activity=activity, works=works)

    def _works(self, pid: int, activity: str) -> bool:
        """Whether the rank uses the processor. On a busy host it may be ready to run, and get
        little of one.
        """
        if activity == "running":
            return True
        before = self._cpu_seconds.get(pid, math.inf)
        seconds = self._clock() - self._sampled
        return processes.cpu_seconds([pid])[pid] - before > _WORKS * (1 + seconds)


def _frames(pid: int, file: Path) -> list[FrameSummary]:
    return processes.main_thread(processes.ask_for_stack(pid, file))


class Slowness:
    """Finds one rank that all others wait for. It looks once in `every` seconds, and judges the
    time since the last look.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._before: Mapping[int, View] = {}
        self._checked = 0.0
        self._named: set[int] = set()

    def due(self, now: float) -> bool:
        return now - self._checked >= self._every

    def check(self, views: Mapping[int, View], now: float) -> str | None:
        """Compare with the last look. Return None at the first look, and if no rank is slow."""
        before = self._before
        nanoseconds = 1e9 * (now - self._checked)
        self._checked = now
        # the time of start-up does not count
        trains = min((view.step for view in views.values()), default=0) > 2
        self._before = views if trains else {}
        if not trains or before.keys() != views.keys():
            return None
        shares = {}
        for rank, view in views.items():
            shares[rank] = (view.waited_ns - before[rank].waited_ns) / nanoseconds
        slow = min(shares, key=shares.__getitem__)
        slow_share = shares.pop(slow)
        if slow in self._named or slow_share > _QUICK or min(shares.values()) < _SLOW:
            return None
        self._named.add(slow)
        spent = {}
        for phase, total in views[slow].totals_ns.items():
            spent[phase] = total - before[slow].totals_ns[phase]
        phase = max(spent, key=spent.__getitem__)
        waiting = 100 * sum(shares.values()) / len(shares)
        in_phase = 100 * spent[phase] / max(1, sum(spent.values()))
        return (
            f"SLOW: {named(shares)} {'waits' if len(shares) == 1 else 'wait'} {waiting:.0f} % of"
            f" the time for rank {slow}, which is alive and spends {in_phase:.0f} % of its own time"
            f" {DOING[phase]}. This warning appears once."
        )
