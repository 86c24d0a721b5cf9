"""The command that runs a job on a Ray cluster: it asks Ray for nodes, gives them their ranks, and
reports in the end what went wrong.

    gathering   which nodes are there, and how many ranks does each take?
                -> an actor per node, until there are enough ranks
    running     every node is given its ranks; one node opens the store for their rendezvous
    stopping    a rank has failed, or a node has gone: the other nodes end their ranks
                -> done, or gathering again, from the newest checkpoint

Ray says which nodes live and what they have. It starts the actors and notices when one dies. It
restarts nothing here: only the driver decides which nodes take part after a restart. A node that
comes later is prepared while the others train, and used from the next checkpoint on. The ranks that
were started together are a WorkerGroup; a restart creates a new WorkerGroup.
"""

from __future__ import annotations

import math
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from lockstep.errors import ExitCode
from lockstep.integrations.ray_cluster import cluster
from lockstep.integrations.ray_cluster.job import Job
from lockstep.integrations.ray_cluster.members import Member, Members, NoFolder
from lockstep.launcher import failures
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.stalls_of_nodes import NodeReport, NodeReports
from lockstep.launcher.stop import Stop, note_signals, print_line
from lockstep.launcher.supervise import BEGINS_AGAIN, Outcome, conclude
from lockstep.runtime.failure_record import Failure


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """The nodes of ranks that were started together, and what the nodes have reported."""

    members: Sequence[Member]
    """In the order of their ranks."""
    reports: NodeReports = field(default_factory=NodeReports)
    lost: list[Failure] = field(default_factory=list)
    stopping: bool = False
    may_stop: bool = False
    """Whether the ranks have saved a checkpoint, and heed signals."""
    asked_to_save: bool = False
    asked_to_grow: bool = False
    leaving: str = ""
    """The node that is about to be taken away, because of which the ranks were asked to save and
    exit.
    """

    def __post_init__(self) -> None:
        for member in self.members:
            member.outcome = None
            member.ranks = None
            member.store = None

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.outcome is None]

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            for member in self.running:
                member.send("stop")

    def save_and_end(self) -> None:
        """Ask all ranks to save after this step, and to exit. A second signal would end them."""
        if not self.asked_to_save:
            self.asked_to_save = True
            for member in self.running:
                member.send("signal", signal.SIGUSR1)

    def handle(self, member: Member, kind: str, content: Any) -> None:
        """Handle a node's message. Messages about the ranks are ignored if the node's ranks have
        ended, or if it has none in this group.
        """
        if kind == "store":
            member.store = content
        elif member not in self.members or member.outcome is not None:
            return
        elif kind == "gone":
            self._lose(member, content)
        elif kind == "ended":
            member.outcome = content
            if content.failure is not None and content.exit_code != ExitCode.PREEMPTED:
                self.stop()
        elif kind == "checkpoint":
            self.may_stop = self.may_stop or content
        elif kind == "moving":
            self.reports.remove(member.node.id)
        else:
            self._add_report(member, content)

    def _lose(self, member: Member, reason: str) -> None:
        """Record that a node has gone, and its ranks with it."""
        rank = 0
        ranks = member.ranks
        if ranks is not None:
            rank = ranks.first_rank
            reason += f"; with it went {failures.named(ranks.numbers)} of {ranks.size}"
        failure = Failure(
            rank=rank,
            kind="node",
            message=reason,
            code=ExitCode.FAILED,
            pid=0,
            host=member.node.label,
        )
        self.lost.append(failure)
        member.outcome = Outcome(ExitCode.FAILED)

    def _add_report(self, member: Member, report: NodeReport) -> None:
        """Record that a member's ranks do not progress. The others are asked. When all have
        reported, all are told which rank the others wait for.
        """
        if self.reports.add(member.node.id, report):
            for other in self.running:
                if other is not member:
                    other.send("stall")
        stall = self.reports.explain({member.node.id: member.node.label for member in self.running})
        if stall is not None:
            for member in self.running:
                member.send("stall", stall)

    def outcome(self) -> Outcome:
        """Return the outcome of the group, after all have ended: that of the first failure."""
        reported = list(self.lost)
        results: list[bytes] = []
        exit_code = ExitCode.OK.value
        for member in self.members:
            outcome = member.outcome
            if outcome is None:
                continue
            if outcome.failure is not None:
                on_our_clock = outcome.failure.monotonic_ns + member.shift_ns
                host = member.node.label
                reported.append(replace(outcome.failure, monotonic_ns=on_our_clock, host=host))
            exit_code = exit_code or outcome.exit_code
            results += outcome.results
        cause = failures.first(reported)
        if cause is None:
            return Outcome(exit_code, results=results)
        return Outcome(cause.code, cause)


_LOOK_SECONDS = 0.2
_LATE_SECONDS = 10.0  # seconds that enough nodes wait, at the beginning, for the other nodes
_REMIND_SECONDS = 60.0

Prepare = Callable[[int], None]
"""Called before ranks are started, with the number of ranks."""


class Driver:
    """The driver of one job, until its exit code is known."""

    def __init__(self, job: Job, prepare: Prepare, stop: Stop, out: TextIO) -> None:
        """`out`: the stream to which the ranks' output goes."""
        self._job = job
        self._prepare = prepare
        self._stop = stop
        self._streams = {"out": out, "err": sys.stderr}
        self.members = Members(job)
        self.group = WorkerGroup([])
        """The latest group."""
        self._left = job.restarts
        self._resumable = False  # whether a checkpoint is known
        self._hint = "" if job.target.ours else BEGINS_AGAIN
        self._signals = 0

    def work(self) -> Outcome:
        """Run ranks until they are not restarted any more. Return the last outcome."""
        while True:
            shares = self._gather()
            if shares is None:
                return Outcome(128 + (self._stop.number or 0))
            self.group = WorkerGroup(list(shares))
            outcome = self._run(shares)
            restart = self._restart_message(outcome)
            if restart is None:
                return outcome
            print_line(restart)

    def _gather(self) -> Mapping[Member, int] | None:
        """Return the nodes that take part and how many ranks each takes, once there are enough;
        None if the driver was asked to stop.
        """
        printed = ""
        printed_at = 0.0
        enough_at = 0.0
        began = time.monotonic()
        members = self.members
        while self._stop.number is None:
            members.survey(every=0.0)
            wanted = members.wanted()
            members.invite(wanted)
            ready = members.ready(wanted)
            now = time.monotonic()
            if sum(ready.values()) >= self._job.least:
                enough_at = enough_at or now
                late = now - enough_at > _LATE_SECONDS
                # After the first start, a node that is not ready yet is used from the next
                # checkpoint on.
                if len(ready) == len(wanted) or late or not members.first:
                    members.first = False
                    break
            else:
                missing = members.missing(wanted, now - began)
                if missing and (missing != printed or now - printed_at > _REMIND_SECONDS):
                    printed = missing
                    printed_at = now
                    print_line(missing)
                    cluster.request(self._job.least, gpus=members.gpus)
            self._handle_messages()
        if printed:
            cluster.request(0, gpus=members.gpus)
        return ready if self._stop.number is None else None

    def _run(self, shares: Mapping[Member, int]) -> Outcome:
        """Start ranks on these nodes, and watch them until all have ended."""
        group = self.group
        size = sum(shares.values())
        first = 0
        for file in (self._job.grow, self._job.wanted):
            if file is not None:
                file.unlink(missing_ok=True)
        self._prepare(size)
        address, port = self._store(group.members[0])
        for number, (member, count) in enumerate(shares.items()):
            ranks = LocalRanks(
                count=count,
                first_rank=first,
                size=size,
                node=number,
                nodes=len(shares),
                address=address,
                port=port,
            )
            first += count
            if member.outcome is None:
                member.ranks = ranks
                member.send("start", ranks)
                if len(shares) > 1:
                    print_line(
                        f"node {number} of {len(shares)}, {member.node.label}:"
                        f" {failures.named(ranks.numbers)} of {size}"
                    )
        while group.running:
            if group.lost:
                group.stop()
            self._handle_messages()
            self.members.survey()
            self._save_before_nodes_leave()
            if size < self._job.most:
                self._prepare_new_nodes()
        return group.outcome()

    def _store(self, member: Member) -> tuple[str, int]:
        """Return the address of the rendezvous store, which the member's node opens."""
        member.send("store")
        while member.store is None and member.outcome is None:
            self._handle_messages()
        return member.store or ("", 0)

    def _save_before_nodes_leave(self) -> None:
        """If Ray has announced that a node will be taken away, tell all ranks to save after this
        step, and to exit.
        """
        leaving = self.members.leaving
        labels = [member.node.label for member in self.group.running if member.node.id in leaving]
        heeds = self._job.heeds or self.group.may_stop
        if labels and heeds and not self.group.leaving:
            self.group.leaving = labels[0]
            print_line(f"node {labels[0]} is about to be taken away: saving after this step")
            self.group.save_and_end()

    def _prepare_new_nodes(self) -> None:
        """Prepare new nodes. When they are ready, make the ranks end at their next checkpoint, and
        those of a script after their first one.
        """
        group = self.group
        wanted = self._job.wanted
        if wanted is None and not group.may_stop:
            return
        self.members.invite(self.members.wanted(), known=False)
        if group.asked_to_grow or group.stopping or group.leaving:
            return
        if any(member.ready and member not in group.members for member in self.members):
            group.asked_to_grow = True
            if wanted is None:
                group.save_and_end()
            else:
                wanted.touch()

    def _restart_message(self, outcome: Outcome) -> str | None:
        """Return the message before a restart; None if there is no restart."""
        if self._stop.number is not None:
            return None
        job = self._job
        # the signal ends a rank that does not heed it yet
        stopped = outcome.exit_code in (ExitCode.PREEMPTED, 128 + signal.SIGUSR1)
        if self.group.leaving and stopped:
            for member in self.members:
                if member.node.id in self.members.leaving:
                    self.members.dismiss(member)
            return f"resuming without node {self.group.leaving}"
        if self.group.asked_to_save and outcome.exit_code == ExitCode.PREEMPTED:
            return "continuing with more nodes"
        failure = outcome.failure
        if failure is None:
            if outcome.exit_code == ExitCode.OK and job.grow is not None and job.grow.exists():
                return "continuing with more nodes"
            return None
        if failure.kind == "corrupt" and job.launch.on_corruption == "exclude":
            return self._exclude_node_of(failure)
        after_stall = job.launch.on_stall == "restart" and failure.kind == "stall"
        if self._left == 0 or not (failure.killed or after_stall):
            return None
        self._left -= 1
        origin = "resuming from the newest checkpoint"
        if not self._resumable:
            origin = "starting from the beginning"
        restart = f"restart {job.restarts - self._left} of {job.restarts}"
        message = f"{failures.summary(failure)}; {origin} ({restart})"
        if self._hint and not self._resumable:
            message += f"\n{self._hint}"
            self._hint = ""
        return message

    def _exclude_node_of(self, failure: Failure) -> str | None:
        """Exclude for good the node of a rank that computes wrong, and return the message; None if
        it is the only node.
        """
        if len(self.group.members) == 1:
            print_line(
                "--on-corruption exclude: the run is on one node, and nothing is left without it"
            )
            return None
        for member in self.group.members:
            if member.ranks is not None and failure.rank in member.ranks.numbers:
                self.members.exclude(member, math.inf)
                label = member.node.label
        return f"{failures.summary(failure)}; resuming without node {label}"

    def _handle_messages(self) -> None:
        """Pass signals on, and handle what Ray and the nodes report."""
        if self._stop.number is not None and self._signals < self._stop.times:
            self._signals = self._stop.times
            if self._signals == 1 and self._job.heeds:
                print_line(f"{self._stop.name}: stopping after this step; once more to stop now")
            for member in self.members:
                if member.admitted:
                    member.send("signal", self._stop.number)
        for member, kind, content in self.members.messages(_LOOK_SECONDS):
            if kind in self._streams:
                self._streams[kind].buffer.write(content)
                self._streams[kind].flush()
                continue
            self._resumable = self._resumable or kind == "checkpoint"
            self.group.handle(member, kind, content)


def call_on_cluster(job: Job) -> list[Any]:
    """Make all ranks call the job's function, and return the results by rank. Raises WorkerFailed
    for the first rank that failed.
    """
    outcome = _run(job, lambda size: None, reports=False)
    if outcome.failure is not None:
        raise failures.worker_failed(outcome.failure)
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return [pickle.loads(result) for result in outcome.results]


def run_on_cluster(
    job: Job, prepare: Prepare = lambda size: None, *, reports: bool = True
) -> Outcome:
    """Run `job` on the cluster until its end. With `reports`, print how it ended if it did not end
    well.

    If a node does not see the folder of the task or script as the driver does, Ray brings it to all
    nodes.
    """
    try:
        return _run(job, prepare, reports=reports)
    except NoFolder:
        return _run(job.without_folder(), prepare, reports=reports, brought=job.brought)


def _run(job: Job, prepare: Prepare, *, reports: bool, brought: Path | None = None) -> Outcome:
    out = sys.stdout
    with cluster.connected(job.cluster, brought), note_signals() as stop:
        driver = Driver(job, prepare, stop, out)
        try:
            outcome = driver.work()
            return conclude(outcome, stop, heeds=job.heeds) if reports else outcome
        finally:
            driver.members.close()
