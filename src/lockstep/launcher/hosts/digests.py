"""What hosts tell each other of ranks that do not get on, and what follows when all have.

one host    its ranks have been quiet for too long: it tells what it sees of them, and the others are asked
the others  tell the same of theirs, once they have been quiet for as long; ranks that move are not waited for, they are slow
verdict     from all sights together, by the rules of one host (stalls.explain), for every host the same
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lockstep.launcher.hosts.channel import Message, Stranger
from lockstep.launcher.hosts.messages import typed
from lockstep.launcher.stalls import Sight, Stall, explain
from lockstep.status import View
from lockstep.step_clock import PHASES

_LONGEST = 4000  # of a stack
_MOST = 4096  # ranks


@dataclass(frozen=True, slots=True)
class Digest:
    """Of one host's ranks."""

    quiet: float
    sights: Mapping[int, Sight]

    def message(self, generation: int) -> Message:
        now = time.monotonic_ns()
        ranks = [
            {
                "rank": rank,
                "pid": sight.pid,
                "state": sight.state,
                "where": sight.where,
                "stack": sight.stack[-_LONGEST:],
                "phase": sight.view.phase,
                "step": sight.view.step,
                "number": sight.view.number,
                "waits": sight.view.waits,
                "messages": sight.view.messages,
                "for_ns": now - sight.view.since_ns,
                "collectives": {str(number): text for number, text in sight.view.collectives.items()},
            }
            for rank, sight in self.sights.items()
        ]
        return {"kind": "quiet", "generation": generation, "seconds": self.quiet, "ranks": ranks}

    @classmethod
    def of(cls, message: Message) -> Digest:
        """Clocks of hosts differ, so what is told is for how long. Raises Stranger."""
        ranks = typed(message, "ranks", list)
        if len(ranks) > _MOST:
            raise Stranger("an agent that does not follow the protocol (a digest)")
        return cls(float(typed(message, "seconds", int | float)), dict(map(_sight, ranks)))


def _sight(told: Any) -> tuple[int, Sight]:
    if not isinstance(told, dict):
        raise Stranger("an agent that does not follow the protocol (a digest)")
    phase, collectives = typed(told, "phase", str), typed(told, "collectives", dict)
    if phase not in PHASES or not all(str(number).isdigit() for number in collectives):
        raise Stranger("an agent that does not follow the protocol (a digest)")
    view = View(
        ticks=0,
        phase=phase,
        step=typed(told, "step", int),
        since_ns=time.monotonic_ns() - typed(told, "for_ns", int),
        number=typed(told, "number", int),
        waits=typed(told, "waits", bool),
        waited_ns=0,
        totals_ns={},
        collectives={int(number): str(text) for number, text in collectives.items()},
        messages=typed(told, "messages", bool),
    )
    return typed(told, "rank", int), Sight(
        typed(told, "pid", int), view, typed(told, "state", str), typed(told, "where", str), typed(told, "stack", str)
    )


class Digests:
    """Of one generation: fed with what hosts tell, by their keys; decisions only."""

    def __init__(self) -> None:
        self._told: dict[int, Digest] = {}
        self.spoken = False
        """Whether there was a verdict since somebody moved last."""

    def tell(self, key: int, digest: Digest) -> bool:
        """Whether it is the first, so that the others are to be asked."""
        first = not self._told
        self._told[key] = digest
        return first

    def moving(self, key: int) -> None:
        self._told.pop(key, None)
        self.spoken = False

    def verdict(self, labels: Mapping[int, str]) -> Stall | None:
        """When all hosts (`labels`, by key) have told, once."""
        if self.spoken or set(labels) - set(self._told):
            return None
        self.spoken = True
        sights = {rank: sight for key in labels for rank, sight in self._told[key].sights.items()}
        found = explain(sights, max(self._told[key].quiet for key in labels))
        if found is None:
            return None
        where = next((label for key, label in labels.items() if found.rank in self._told[key].sights), "")
        if not found.elsewhere:
            return replace(found, message=f"{found.message} Rank {found.rank} is on {where}.")
        message = found.message.replace("all ranks of this host wait", "all ranks of all hosts wait")
        return replace(
            found,
            message=message.replace(": for other hosts, or the network", ", which does not end: look at the network"),
            elsewhere=False,
        )


def packed(stall: Stall) -> Message:
    return {"kind": "verdict", **{name: value[-_LONGEST:] if isinstance(value, str) else value for name, value in asdict(stall).items()}}


def unpacked(message: Message) -> Stall:
    """Raises Stranger."""
    return Stall(typed(message, "rank", int), typed(message, "message", str), typed(message, "stack", str))


class Heard:
    """This host's end: what it tells (`send`), and what it has heard. Its setters are called in the connection's thread."""

    def __init__(self, generation: int, send: Callable[[Message], None]) -> None:
        self._generation, self._send = generation, send
        self._asked = False
        self._verdict: Stall | None = None

    def note(self, message: Message) -> None:
        if message["kind"] == "verdict":
            self._verdict = unpacked(message)
        else:
            self._asked = True

    def asked(self) -> bool:
        return self._asked

    def tell(self, sights: Mapping[int, Sight], quiet: float) -> None:
        self._send(Digest(quiet, sights).message(self._generation))

    def moving(self) -> None:
        self._asked = False
        self._send({"kind": "moving", "generation": self._generation})

    def verdict(self) -> Stall | None:
        found, self._verdict = self._verdict, None
        return found
