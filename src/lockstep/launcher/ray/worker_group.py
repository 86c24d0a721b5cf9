"""The ranks that were started together on the nodes of a cluster, and what has happened since. A
restart starts another group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import ExitCode
from lockstep.launcher import failures
from lockstep.launcher.failures import Failure
from lockstep.launcher.ray.members import Member
from lockstep.launcher.stalls import Quiet, QuietNodes
from lockstep.launcher.supervise import Outcome


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """Its nodes, and what they have said."""

    members: Sequence[Member]
    """By the numbers of their ranks."""
    told: QuietNodes = field(default_factory=QuietNodes)
    lost: list[Failure] = field(default_factory=list)
    stopping: bool = False
    asked_to_grow: bool = False
    leaving: str = ""
    """The node that is about to be taken away, because of which the ranks were asked to save and
    leave.
    """

    def __post_init__(self) -> None:
        for member in self.members:
            member.outcome, member.ranks, member.store = None, None, None

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.outcome is None]

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            for member in self.running:
                member.send("stop")

    def hear(self, member: Member, kind: str, content: Any) -> None:
        """What a node has said. Those whose ranks have ended, or that have none in this group,
        say nothing about it.
        """
        if kind == "store":
            member.store = content
        elif kind == "results":
            member.results = content
        elif member not in self.members or member.outcome is not None:
            return
        elif kind == "gone":
            self._lose(member, content)
        elif kind == "ended":
            member.outcome = content
            if content.failure is not None and content.exit_code != ExitCode.PREEMPTED:
                self.stop()
        elif kind == "moving":
            self.told.moving(member.place.id)
        else:
            self._quiet(member, content)

    def _lose(self, member: Member, why: str) -> None:
        """A node has gone, and its ranks with it."""
        ranks = member.ranks
        self.lost.append(
            Failure(
                rank=0 if ranks is None else ranks.first_rank,
                kind="node",
                message=(
                    why
                    if ranks is None
                    else f"{why}; with it went {failures.named(ranks.numbers)} of {ranks.size}"
                ),
                code=ExitCode.FAILED,
                pid=0,
                host=member.place.label,
                monotonic_ns=time.monotonic_ns(),
            )
        )
        member.outcome = Outcome(ExitCode.FAILED)

    def _quiet(self, member: Member, told: Quiet) -> None:
        """A member's ranks do not progress: the others are asked, and when all have told, all
        hear which rank the others wait for.
        """
        if self.told.quiet(member.place.id, told):
            for other in self.running:
                if other is not member:
                    other.send("stall")
        stall = self.told.verdict({each.place.id: each.place.label for each in self.running})
        if stall is not None:
            for each in self.running:
                each.send("stall", stall)

    def outcome(self) -> Outcome:
        """Of all of them, when they have ended: that of what failed first."""
        reported = [
            replace(
                failure,
                monotonic_ns=failure.monotonic_ns + member.shift_ns,
                host=member.place.label,
            )
            for member in self.members
            if member.outcome is not None and (failure := member.outcome.failure) is not None
        ]
        cause = failures.first([*self.lost, *reported])
        if cause is not None:
            return Outcome(cause.code, cause)
        return next(
            (
                member.outcome
                for member in self.members
                if member.outcome and member.outcome.exit_code
            ),
            Outcome(ExitCode.OK),
        )
