"""Options of the launcher: how it places and watches ranks, and what it does on a fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config import knob
from lockstep.config.knob import Knob

OnStall = Literal["wait", "abort", "restart"]
OnCorruption = Literal["abort", "exclude"]
Bind = Literal["auto", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How the launcher places and watches ranks, and handles faults. Raises UsageError for invalid
    values.
    """

    bind: Annotated[Bind, Knob("run")] = "auto"
    """Bind each rank to physical cores of its own on hosts with several NUMA nodes or spare
    cores.
    """

    max_restarts: Annotated[
        int | None, Knob("faults", least=0, default="3 with N:M workers, else 0")
    ] = None
    """Maximum number of restarts after a worker is killed or a node is lost."""
    timeout: Annotated[float | None, Knob("faults", unit="SECONDS", above=0, default="1800")] = None
    """Maximum duration of one collective, in seconds."""
    on_stall: Annotated[OnStall, Knob("faults")] = "abort"
    """On a stall: warn and wait, abort, or restart."""
    stall_after: Annotated[float, Knob("faults", unit="SECONDS", above=0)] = 30
    """Seconds without progress before a stall is declared. Runs with slow steps get more."""
    on_corruption: Annotated[OnCorruption, Knob("faults")] = "abort"
    """When --witness finds a wrong result: end the run, or resume without that node (--ray)."""
    grace: Annotated[float, Knob("faults", unit="SECONDS", least=0)] = 60
    """Seconds that a script's own signal handlers have when the launcher is asked to stop."""
    debug: Annotated[bool, Knob("debug")] = False
    """Write messages of NCCL and torch, and a line for each collective, to the ranks' logs."""
    cold: Annotated[bool, Knob("debug")] = False
    """Start a new Python process for each rank, in place of a fork that has imported torch."""

    def __post_init__(self) -> None:
        knob.check(self)
