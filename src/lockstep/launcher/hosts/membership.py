"""Who takes part, in which order, and what follows from how it ends on each host: decisions only, no sockets and no clock.

    gathering   enough hosts are here?           -> every member is sent its roll
    running     all hosts have ended well        -> end, or gather anew with those who wait
    stopping    one failed, or has gone: the rest are told to stop; when all have reported -> end, or gather anew with what is left

The first failure of all hosts is chosen as on one (`failures.first`): by kind, then by time, for which every host gives the
times of its failures on the meeting's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.errors import ExitCode
from lockstep.launcher import failures
from lockstep.launcher.failures import Failure
from lockstep.launcher.hosts.channel import Message
from lockstep.launcher.hosts.digests import Digest, Digests, packed
from lockstep.launcher.hosts.messages import End, Newcomer, Report, Roll
from lockstep.launcher.hosts.plan import JOIN_SECONDS, Plan

LAST_CALL_SECONDS = 5.0
"""With N:M, how long after the last arrival of at least N hosts the first generation begins."""
_QUIET_SECONDS = 5.0  # before it is said who is missing


@dataclass(slots=True)
class _Host:
    who: Newcomer
    number: int
    """Of its arrival."""


class Membership:
    """Fed with what happens; `outbox` is what shall be sent, (key, message), and `end` the last word for everybody once it is spoken.

    `open_store(size)` makes the store for a generation of so many ranks and returns its address and port.
    """

    def __init__(self, plan: Plan, now: float, open_store: Callable[[int], tuple[str, int]]) -> None:
        self._plan, self._open_store = plan, open_store
        self._hosts: dict[int, _Host] = {}
        self._arrivals = 0
        self._members: list[int] = []
        self._rolls: list[Roll] = []
        self._reports: dict[int, Report] = {}
        self._lost: list[Failure] = []
        self._phase: Literal["gathering", "running", "stopping"] = "gathering"
        self._generation = 0
        self._left = plan.restarts
        self._since = self._last_arrival = now
        self._said: str | None = None
        self._asked_to_grow = False
        self._digests = Digests()
        self.about: Mapping[str, str] = {}
        self.outbox: list[tuple[int, Message]] = []
        self.end: End | None = None

    # -- what happens ------------------------------------------------------------------------------------------------------------------

    def join(self, key: int, who: Newcomer, now: float) -> None:
        """An agent has joined; one that does not fit is told why. Where the number of hosts is fixed, so are all the others."""
        if self.end is not None:
            return
        problem, whose = self._misfit(who)
        if problem:
            end = End(code=ExitCode.USAGE, line=f"error: {problem}")
            if whose == "all":
                self._finish(end)
            else:
                self.outbox.append((key, end.message()))
            return
        self._arrivals += 1
        self._hosts[key] = _Host(who, self._arrivals)
        self._last_arrival = now
        self._ask_to_grow()

    def leave(self, key: int, why: str, now: float, *, code: int = ExitCode.FAILED) -> None:
        """An agent has gone: `why` continues the sentence "HOST ..."."""
        host = self._hosts.pop(key, None)
        if host is None or self.end is not None or self._phase == "gathering" or key not in self._members or key in self._reports:
            return
        roll = self._rolls[self._members.index(key)]
        ranks = failures.named(range(roll.first_rank, roll.first_rank + roll.share))
        message = f"{why}; with it went {ranks} of {roll.size}"
        self._lost.append(
            Failure(
                rank=roll.first_rank,
                kind="host",
                message=message,
                code=code,
                pid=host.who.pid,
                host=host.who.label,
                monotonic_ns=int(now * 1e9),
            )
        )
        self._stop_others()
        self._decide(now)

    def report(self, key: int, report: Report, now: float) -> None:
        """A generation has ended on a host."""
        host = self._hosts.get(key)
        if host is None or self.end is not None or key not in self._members or self._phase == "gathering":
            return
        if report.signal is not None:
            name = failures.signal_name(report.signal)
            code = 128 + report.signal
            if host.who.hosting:
                self._finish(End(code=code, line=f"{host.who.label}, where the hosts meet, was stopped by {name}; all ranks have ended"))
                return
            self.outbox.append((key, End(code=code, line=f"stopped by {name}; all ranks of this host have ended").message()))
            self.leave(key, f"was stopped by {name}", now, code=code)
            return
        self._reports[key] = report
        if report.failure is not None:
            self._stop_others()
        self._decide(now)

    def quiet(self, key: int, generation: int, digest: Digest) -> None:
        """A host's ranks do not get on. When all hosts have told so, all hear who is waited for."""
        if self._phase != "running" or generation != self._generation or key not in self._members:
            return
        if self._digests.tell(key, digest):
            self.outbox += [(other, {"kind": "look", "generation": generation}) for other in self._pending() if other != key]
        stall = self._digests.verdict({other: self._hosts[other].who.label for other in self._pending()})
        if stall is not None:
            self.outbox += [(other, {**packed(stall), "generation": generation}) for other in self._pending()]

    def moving(self, key: int, generation: int) -> None:
        """They do again."""
        if generation == self._generation:
            self._digests.moving(key)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.end is not None or self._phase != "gathering":
            return
        if self._complete(now):
            self._start()
            return
        patience = JOIN_SECONDS if self._plan.join_timeout is None else self._plan.join_timeout
        if now - self._since > patience:
            end = End(
                code=ExitCode.FAILED,
                line=f"error: after {patience:g} s {self._missing()}; start the command on every host, or give fewer --nodes",
            )
            self._finish(end)
        elif len(self._hosts) < self._plan.least and now - self._since > _QUIET_SECONDS and (line := self._missing()) != self._said:
            self._said = line
            self.outbox += [(key, {"kind": "waiting", "line": line}) for key in self._hosts]

    def call_off(self, end: End) -> None:
        """The host that holds the meeting cannot go on."""
        self._finish(end)

    # -- who fits ----------------------------------------------------------------------------------------------------------------------

    def _misfit(self, who: Newcomer) -> tuple[str, Literal["all", "newcomer"]]:
        """Why an agent cannot take part, and whether that ends the run for all; "" if it can."""
        fatal: Literal["all", "newcomer"] = "newcomer" if self._plan.elastic or self._generation else "all"
        for host in self._hosts.values():
            other = host.who
            if other.node_rank is not None and other.node_rank == who.node_rank:
                both = f"{other.label} pid {other.pid} and {who.label} pid {who.pid}"
                return f"--node-rank {who.node_rank} is claimed twice, by {both}: give every host a number of its own", fatal
            if differences := _differences(other.facts, who.facts):
                name, theirs, ours = differences[0]
                return f"{name} is {theirs} on {other.label} and {ours} on {who.label}: {_fix(name)}", fatal
        if self._generation and not self._plan.elastic and self._phase != "gathering":
            return f"the run has begun without {who.label}: --nodes {self._plan.nodes} are complete", "newcomer"
        if len(self._hosts) >= self._plan.most:
            here = ", ".join(host.who.label for host in self._hosts.values())
            return f"{who.label} is one too many for --nodes {self._plan.nodes}: {here} are here already", "newcomer"
        return "", fatal

    def _missing(self) -> str:
        """Who is here and who is not, as a sentence without its end."""
        here = ", ".join(host.who.label for host in self._hosts.values())
        known = {host.who.node_rank for host in self._hosts.values() if host.who.node_rank is not None}
        absent = [str(rank) for rank in range(self._plan.most) if rank not in known]
        which = f" (--node-rank {', '.join(absent)})" if known and len(known) == len(self._hosts) and not self._plan.elastic else ""
        count = max(1, self._plan.least - len(self._hosts))  # enough without the first host are one too few
        return f"{len(self._hosts)} of --nodes {self._plan.nodes} are here: {here}; {count} more must come{which}"

    # -- a generation ------------------------------------------------------------------------------------------------------------------

    def _complete(self, now: float) -> bool:
        count = len(self._hosts)
        if count < self._plan.least or not any(host.who.hosting for host in self._hosts.values()):
            return False
        return count == self._plan.most or self._generation > 0 or now - self._last_arrival > LAST_CALL_SECONDS

    def _start(self) -> None:
        self._members, self._lost, self._reports = self._ordered(), [], {}
        self._phase, self._asked_to_grow, self._said = "running", False, None
        self._generation += 1
        self._digests = Digests()
        seats = [self._hosts[key].who for key in self._members]
        labels, workers = [who.label for who in seats], [who.workers for who in seats]
        address, port = self._open_store(sum(workers))
        common: dict[str, Any] = {
            "generation": self._generation,
            "hosts": labels,
            "workers": workers,
            "address": address,
            "port": port,
            "about": self.about,
        }
        self._rolls = [Roll(index=index, **common) for index in range(len(seats))]
        self.outbox += [(key, roll.message()) for key, roll in zip(self._members, self._rolls, strict=True)]

    def _ordered(self) -> list[int]:
        """By node rank; who gave none takes the free numbers in the order of arrival."""
        chosen = {host.who.node_rank: key for key, host in self._hosts.items() if host.who.node_rank is not None}
        others = [key for key, host in sorted(self._hosts.items(), key=lambda item: item[1].number) if host.who.node_rank is None]
        free = (number for number in range(self._plan.most) if number not in chosen)
        chosen.update(zip(free, others, strict=False))
        return [key for _, key in sorted(chosen.items())]

    def _ask_to_grow(self) -> None:
        """Somebody waits: rank 0 is asked to end the generation at its next checkpoint."""
        waiting = any(key not in self._members for key in self._hosts)
        if self._phase == "running" and waiting and not self._asked_to_grow:
            self._asked_to_grow = True
            self.outbox.append((self._members[0], {"kind": "grow"}))

    def _stop_others(self) -> None:
        if self._phase == "running":
            self._phase = "stopping"
            self.outbox += [(key, {"kind": "stop", "generation": self._generation}) for key in self._pending()]

    def _decide(self, now: float) -> None:
        """When every member that is still here has reported."""
        if self.end is not None or self._pending():
            return
        reports = self._reports.values()
        cause = failures.first([*self._lost, *(report.failure for report in reports if report.failure is not None)])
        if cause is None:
            if any(report.grown for report in reports):
                self._again(f"going on with {self._count_of_all()}", now)
            else:
                self._finish(End(code=ExitCode.OK))
            return
        comes_back = cause.killed or (self._plan.after_stalls and cause.kind == "stall")
        if not comes_back or self._left == 0:
            self._finish(End(code=cause.code, failure=cause))
            return
        self._left -= 1
        restart = f"restart {self._plan.restarts - self._left} of {self._plan.restarts}"
        self._again(f"{failures.summary(cause)}; going on with {self._count_of_all()} from the newest checkpoint ({restart})", now)

    def _pending(self) -> list[int]:
        """Members that are here and whose ranks run."""
        return [key for key in self._members if key in self._hosts and key not in self._reports]

    def _count_of_all(self) -> str:
        count, ranks = len(self._hosts), sum(host.who.workers for host in self._hosts.values())
        return f"{count} host{'s' * (count != 1)} and {ranks} worker{'s' * (ranks != 1)}"

    def _again(self, line: str, now: float) -> None:
        self._phase, self._since = "gathering", now
        self.outbox += [(key, {"kind": "again", "line": line}) for key in self._hosts]

    def _finish(self, end: End) -> None:
        self.end = self.end or end


def _differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = [*theirs, *(name for name in ours if name not in theirs)]
    pairs = [(name, theirs.get(name, "not given"), ours.get(name, "not given")) for name in names]
    return [(name, before, now) for name, before, now in pairs if before != now]


def _fix(name: str) -> str:
    return "install the same version on every host" if name in ("lockstep", "torch", "Python") else "give the same command on every host"
