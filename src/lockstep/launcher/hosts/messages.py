"""The messages' contents: who joins, what a host's share of a generation is, how it ended there, and the last word.

What came over the network is taken apart here, field by field: a value of another type is an error, a field that is not known is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from lockstep.launcher.failures import Failure, Kind, Standing
from lockstep.launcher.hosts.channel import Message, Stranger
from lockstep.launcher.stalls import Elsewhere

_LONGEST_TEXT = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """What an agent says of itself when it joins."""

    name: str
    address: str
    pid: int
    workers: int
    node_rank: int | None = None
    hosting: bool = False
    """Whether the meeting is held in its process."""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.address})"

    def message(self) -> Message:
        return {"kind": "join", **asdict(self)}

    @classmethod
    def of(cls, message: Message) -> Newcomer:
        facts = typed(message, "facts", dict)
        return cls(
            name=typed(message, "name", str),
            address=typed(message, "address", str),
            pid=typed(message, "pid", int),
            workers=typed(message, "workers", int),
            node_rank=typed(message, "node_rank", int | None),
            hosting=typed(message, "hosting", bool),
            facts={str(name): str(value) for name, value in facts.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """One generation, as one host is told of it."""

    generation: int
    hosts: Sequence[str]
    """Labels, in the order of their ranks."""
    workers: Sequence[int]
    """Ranks of each host."""
    index: int
    """This host's place among them."""
    address: str
    """Of the store that the ranks meet through."""
    port: int
    about: Mapping[str, str] = field(default_factory=dict)
    """What the host that holds the meeting tells the others of the run."""

    @property
    def size(self) -> int:
        return sum(self.workers)

    @property
    def first_rank(self) -> int:
        return sum(self.workers[: self.index])

    @property
    def share(self) -> int:
        return self.workers[self.index]

    def message(self) -> Message:
        return {"kind": "roll", **asdict(self)}

    @classmethod
    def of(cls, message: Message) -> Roll:
        return cls(
            generation=typed(message, "generation", int),
            hosts=[str(label) for label in typed(message, "hosts", list)],
            workers=[int(count) for count in typed(message, "workers", list)],
            index=typed(message, "index", int),
            address=typed(message, "address", str),
            port=typed(message, "port", int),
            about={str(name): str(value) for name, value in typed(message, "about", dict).items()},
        )


@dataclass(frozen=True, slots=True)
class Share:
    """This host's part of a generation, as the agent that runs it needs it."""

    roll: Roll
    called_off: Callable[[], bool]
    """Whether its ranks shall end, because the generation has ended elsewhere."""
    elsewhere: Elsewhere | None = None
    """The ranks of the other hosts, for who is waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How a generation ended on one host."""

    failure: Failure | None = None
    """The first of this host's, its time on the meeting's clock."""
    signal: int | None = None
    """What the agent itself was stopped by."""
    grown: bool = False
    """Whether the ranks ended at a checkpoint, for more hosts. Rank 0's host knows."""

    def message(self) -> Message:
        return {"kind": "report", "failure": packed(self.failure), "signal": self.signal, "grown": self.grown}

    @classmethod
    def of(cls, message: Message) -> Report:
        failure = unpacked(typed(message, "failure", dict | None))
        return cls(failure=failure, signal=typed(message, "signal", int | None), grown=typed(message, "grown", bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The same last word for all hosts: an exit code, and a failure or a sentence to print before."""

    code: int
    line: str = ""
    failure: Failure | None = None

    def message(self) -> Message:
        return {"kind": "end", "code": self.code, "line": self.line, "failure": packed(self.failure)}

    @classmethod
    def of(cls, message: Message) -> End:
        failure = unpacked(typed(message, "failure", dict | None))
        return cls(code=typed(message, "code", int), line=typed(message, "line", str), failure=failure)


def packed(failure: Failure | None) -> dict[str, Any] | None:
    """As JSON can hold it, texts cut to what a message may be long. Of a traceback the end is kept."""
    if failure is None:
        return None
    return {name: value[-_LONGEST_TEXT:] if isinstance(value, str) else value for name, value in asdict(failure).items()}


def unpacked(found: Mapping[str, Any] | None) -> Failure | None:
    """Raises Stranger where a field is missing or of another type."""
    if found is None:
        return None
    values: dict[str, Any] = {}
    for each in fields(Failure):
        number = each.name in ("rank", "code", "pid", "monotonic_ns")
        values[each.name] = typed(found, each.name, int if number else str)
    if values["kind"] not in get_args(Kind) or values["standing"] not in get_args(Standing):
        raise Stranger(f"an agent that does not follow the protocol (a failure of kind {values['kind']!r})")
    return Failure(**values)


def typed(message: Mapping[str, Any], name: str, kind: Any) -> Any:
    """A field of what came over the network. Raises Stranger where it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise Stranger(f"an agent that does not follow the protocol ({name} is {value!r:.40})")
    return value
