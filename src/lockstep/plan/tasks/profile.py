"""What was measured of a task's ranks, before anybody simulates them: kept in a file, so that many plans need one measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan.simulation.work import Leaves

FORMAT = "lockstep profile 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Ranks that computed side by side on one host, without a word to each other. Seconds, medians."""

    ranks: int
    threads: int
    """Intra-op threads of each."""
    steps: int
    """That were timed."""
    forward: float
    """Of a micro-batch."""
    backward: float
    optimizer: float
    """`Stepper.step`, in which nobody is waited for."""
    other: float
    """The rest of a step."""
    loading: float
    """Of a micro-batch, by the rank itself."""
    spread: float
    """Standard deviation of a rank's step from that of its neighbours, or, alone, from its own others; over the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Of one task on this kind of host."""

    task: str
    device: str
    cores: int
    """Of the host that it was measured on."""
    global_batch: int
    micro_batch: int
    buckets: Sequence[Leaves]
    width: int
    """Bytes of an element of a gradient."""
    buffers: int
    """Bytes that ranks average after every step."""
    weights: int
    """Bytes of the parameters."""
    states: int
    """Bytes that the optimizer keeps."""
    peak: float | None
    """Bytes by which a rank's memory grew at most, all of this included; None where the system does not say."""
    messages: Mapping[int, float]
    """Seconds of a sum of a few numbers by the backend, by the number of ranks of this host that make it: the software's part of a message."""
    sides: Sequence[Side]
    """By growing number of ranks."""

    def write(self, file: Path) -> None:
        """Raises UsageError where it cannot be written."""
        found = {"format": FORMAT} | asdict(self)
        try:
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--save-profile {file} cannot be written: {error.strerror}") from None

    @classmethod
    def read(cls, file: Path) -> Profile:
        """Raises UsageError for what is no profile."""
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError
            return cls(**found | _typed(found))
        except OSError as error:
            raise UsageError(f"--profile {file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"--profile {file} is no profile: make one with `lockstep plan TASK --save-profile {file}`") from None

    def message(self, ranks: int) -> float:
        """The software's part of a message among that many ranks of one host. Raises UsageError where it was not measured."""
        if self.device == "cuda":  # the latency of a network of GPUs has it
            return 0.0
        if ranks not in self.messages:
            raise UsageError(_other(", ".join(map(str, sorted(self.messages))) or "no", ranks))
        return self.messages[ranks]

    def side(self, ranks: int) -> Side:
        """The measurement with that many ranks side by side. Raises UsageError where there is none."""
        for each in self.sides:
            if each.ranks == ranks:
                return each
        raise UsageError(_other(", ".join(str(each.ranks) for each in self.sides), ranks))


def _other(measured: str, needed: int) -> str:
    return f"the profile has {measured} ranks side by side on a host, and this plan needs {needed}: leave --profile out, or make it with these options"


def _typed(found: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON keeps as lists, and keys as text."""
    buckets = [
        Leaves(ready=each["ready"], elements=each["elements"], tensors=tuple(tuple(shape) for shape in each["tensors"]))
        for each in found["buckets"]
    ]
    messages = {int(ranks): float(seconds) for ranks, seconds in found["messages"].items()}
    return {"buckets": buckets, "messages": messages, "sides": [Side(**each) for each in found["sides"]]}
