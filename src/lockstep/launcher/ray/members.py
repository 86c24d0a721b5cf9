"""Which nodes of the cluster take part, and with how many ranks each.

invited an actor is started there, with the resources of its ranks admitted it has the driver's
versions and files: its process imports what ranks need ready ranks can be started there
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher.engine import LocalRanks
from lockstep.launcher.preemption import say
from lockstep.launcher.ray import cluster
from lockstep.launcher.ray.actor import Job, Node, NodeFacts, digest, versions
from lockstep.launcher.ray.cluster import Place
from lockstep.launcher.supervise import Outcome

# seconds that an actor waits for a message, before it answers that there is none
_WAIT_SECONDS = 10.0
_SURVEY_SECONDS = 1.0  # seconds between two looks at the cluster's nodes
_SILENT_SECONDS = 15.0  # seconds after which a node that does not answer is named
# seconds that a node is not used after its actor has gone: Ray may list it for a while
_DOUBT_SECONDS = 30.0
_CLOCKS_SECONDS = 1.0  # seconds by which two nodes' clocks may differ before logs become confusing


class NoFolder(Exception):
    """A node does not see the folder of the task or script."""


@dataclass(eq=False, slots=True)
class Member:
    """A node that takes part, or is about to."""

    place: Place
    reserved: int
    """The number of ranks that it has resources for."""
    actor: Any
    pending: Any = None
    """Ray's reference to the actor's next answer: messages of the actor and its process."""
    admitted: bool = False
    ready: bool = False
    shift_ns: int = 0
    """The ns to add to its monotonic clock to get the driver's."""
    ranks: LocalRanks | None = None
    store: tuple[str, int] | None = None
    outcome: Outcome | None = None
    results: Sequence[bytes] = ()
    """What its ranks have returned, if they call a function."""

    def send(self, kind: str, content: object = None) -> None:
        self.actor.send.remote(kind, content)

    def listen(self) -> None:
        self.pending = self.actor.take.options(concurrency_group="words").remote(_WAIT_SECONDS)


class Members:
    """All nodes that take part, as Ray and the nodes themselves report."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gpus = cluster.has_gpus() if job.gpus is None else job.gpus
        self._head = cluster.Head()
        self._surveyed = 0.0
        self._barred: dict[str, float] = {}  # by node: the time until which it is not used
        self._clocks_told: set[str] = set()  # nodes that were warned about; actors may be replaced
        self._members: dict[str, Member] = {}
        self._gone: list[Member] = []
        self._places: Sequence[Place] = ()
        self.leaving: set[str] = set()
        """Nodes that Ray is draining: their machines are about to be taken away."""
        self.first = True
        """Whether no rank has been started yet. Until then a node that does not fit ends the
        command. Later the run continues without such a node.
        """

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def survey(self, every: float = _SURVEY_SECONDS) -> None:
        """Ask Ray which nodes there are, at most once in `every` seconds."""
        now = time.monotonic()
        if now - self._surveyed < every:
            return
        self._surveyed = now
        self._head.check()
        known = list(self._members)
        found = [
            place
            for place in cluster.places(gpus=self._gpus)
            if self._barred.get(place.id, 0.0) < now
        ]
        self.leaving = {place.id for place in found if place.leaves}
        # Nodes that take part already come first, and keep their ranks; then the largest nodes.
        places = sorted(
            found,
            key=lambda place: (
                known.index(place.id) if place.id in known else len(known),
                -place.slots,
            ),
        )
        self._places = [place for place in places if not place.leaves]
        self._gone += [self._members[name] for name in set(known) - {place.id for place in found}]

    def wanted(self) -> dict[Place, int]:
        """Return how many ranks each of the present nodes is to take."""
        each = self._job.each or self._job.most
        counts = shared([min(place.slots, each) for place in self._places], self._job.most)
        return {place: count for place, count in zip(self._places, counts, strict=True) if count}

    def ready(self, wanted: Mapping[Place, int]) -> dict[Member, int]:
        """Return the nodes of `wanted` that can take their ranks now."""
        found = {self._members.get(place.id): count for place, count in wanted.items()}
        return {
            member: count
            for member, count in found.items()
            if member and member.ready and member.reserved >= count
        }

    def invite(self, wanted: Mapping[Place, int], *, known: bool = True) -> None:
        """Start an actor on each of these nodes. `known`: also replace one that has too few
        resources.
        """
        for place, count in wanted.items():
            member = self._members.get(place.id)
            if member is not None and (not known or member.reserved >= count):
                continue
            if member is not None:
                self.dismiss(member)
            code = self._job.code
            asked = (
                self._job.folder,
                None if code is None else str(code),
                "" if code is None else digest(code),
            )
            invited = self._members[place.id] = Member(
                place, count, cluster.actor(Node, asked, place, count, gpus=self._gpus)
            )
            invited.listen()

    def heard(self, seconds: float) -> Iterator[tuple[Member, str, Any]]:
        """Yield what nodes report, after at most `seconds`, and ("gone", why) for nodes that have
        gone.
        """
        while self._gone:
            yield from self._lost(self._gone.pop(), "has gone")
        pending = {member.pending: member for member in self}
        for reference in cluster.wait(list(pending), seconds):
            member, said = pending[reference], cluster.answer(reference)
            if isinstance(said, str):
                yield from self._silent(member, said)
                continue
            for kind, content in said:
                if kind == "facts":
                    self._admit(member, content)
                elif kind == "ready":
                    member.ready = True
                elif kind == "gone":
                    yield from self._lost(member, content)
                else:
                    yield member, kind, content
            if self._members.get(member.place.id) is member:
                member.listen()

    def _silent(self, member: Member, why: str) -> Iterator[tuple[Member, str, Any]]:
        """Handle an actor that does not answer any more."""
        lives = any(place.id == member.place.id for place in cluster.places(gpus=self._gpus))
        if isinstance(why, cluster.Unable) and not member.admitted and lives:
            self._refuse(
                member, UsageError("node-cannot-take-part", node=member.place.label, why=str(why))
            )
        else:
            yield from self._lost(member, why)

    def _lost(self, member: Member, why: str) -> Iterator[tuple[Member, str, Any]]:
        self.bar(member)
        yield member, "gone", why

    def _admit(self, member: Member, facts: NodeFacts) -> None:
        """Start the process of a node that fits."""
        label, ours = member.place.label, versions()
        if name := next(
            (name for name, value in ours.items() if facts.versions[name] != value), None
        ):
            there, here = facts.versions[name], ours[name]
            self._refuse(
                member, UsageError("version-differs", name=name, there=there, node=label, here=here)
            )
            return
        if self._job.folder and not facts.same_code:
            if self.first and self._job.call is None:
                raise NoFolder
            path = str(self._job.code or self._job.folder)
            self._refuse(member, UsageError("code-differs", node=label, path=path))
            return
        ahead = facts.seconds - time.time()
        if abs(ahead) > _CLOCKS_SECONDS and member.place.id not in self._clocks_told:
            self._clocks_told.add(member.place.id)
            say(
                f"warning: the clock of node {label} is {abs(ahead):.1f} s"
                f" {'ahead' if ahead > 0 else 'behind'}: logs will be out of order"
            )
        member.shift_ns = time.monotonic_ns() - facts.monotonic_ns
        member.admitted = True
        member.actor.start.remote(self._job, member.place.address)

    def _refuse(self, member: Member, error: UsageError) -> None:
        if self.first:
            raise error
        self.bar(member, float("inf"))
        say(f"warning: {error}; the run does without it")

    def missing(self, wanted: Mapping[Place, int], seconds: float) -> str:
        """Return a sentence about the resources or nodes that the run has waited for, for
        `seconds`; "" if all nodes are starting as they should.
        """
        kind, job = "GPUs" if self._gpus else "CPUs", self._job
        lacking = job.least - sum(wanted.values())
        if lacking > 0:
            here = (
                ", ".join(f"{place.label} with {place.slots}" for place in self._places) or "none"
            )
            asked = f"{job.least}:{job.most}" if job.least < job.most else str(job.most)
            return (
                f"waiting for {lacking} more {kind}: --workers {asked}; nodes of the cluster:"
                f" {here}"
            )
        silent = [place.label for place in wanted if not self._members[place.id].admitted]
        if silent and seconds > _SILENT_SECONDS:
            return (
                f"waiting for {', '.join(silent)}: other jobs may be using the {kind} (`ray status`"
                " shows them)"
            )
        return ""

    def request(self, ranks: int) -> None:
        """Ask the cluster's autoscaler for room for `ranks` ranks. 0 withdraws the request."""
        cluster.request(ranks, gpus=self._gpus)

    def bar(self, member: Member, seconds: float = _DOUBT_SECONDS) -> None:
        """Do not use the member's node for `seconds`."""
        self._barred[member.place.id] = time.monotonic() + seconds
        self.dismiss(member)

    def dismiss(self, member: Member) -> None:
        if self._members.get(member.place.id) is member:
            del self._members[member.place.id]
        cluster.kill(member.actor)

    def close(self) -> None:
        """End the processes of all nodes, and wait until they have ended."""
        ends = [member.actor.end.remote() for member in self if member.admitted]
        cluster.wait(ends, _WAIT_SECONDS, all_of_them=True)
        for member in self:
            self.dismiss(member)


def shared(slots: Sequence[int], most: int) -> list[int]:
    """Return how many of at most `most` ranks each node takes; `slots` is each node's room. Pure:
    nodes are filled in their order.
    """
    counts = []
    for each in slots:
        counts.append(min(each, most))
        most -= counts[-1]
    return counts
