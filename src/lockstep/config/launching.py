"""Options of the launcher: which run to start or resume, on which machines, and what to do on a
fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.errors import UsageError

OnStall = Literal["wait", "abort", "restart"]
OnCorruption = Literal["abort", "exclude"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChoice:
    """Which run `lockstep train` starts or resumes, on how many ranks. Raises UsageError for
    invalid values.
    """

    workers: Annotated[
        int | str | None,
        Knob(
            "run",
            unit="N|N:M",
            default="the number of GPUs, else 1",
            flags=("--workers", "-n"),
            common=True,
        ),
    ] = None
    """Number of ranks over all hosts. N:M starts up to M, and continues while N or more are
    left.
    """
    run: Annotated[
        Path | None, Knob("run", unit="DIR", default="runs/TASK-DATE-TIME", common=True)
    ] = None
    """Run directory. An unfinished run in it is resumed."""
    resume: Annotated[bool, Knob("run", default="resume if possible, else start", common=True)] = (
        False
    )
    """Fail if the run in --run DIR cannot be resumed."""
    fresh: Annotated[bool, Knob("run")] = False
    """Train from the start in --run DIR. Files of the old run move to DIR/before-1."""
    overrides: Annotated[
        Mapping[str, str], Knob("run", unit="KEY=VALUE", flags=("--set",), common=True)
    ] = field(default_factory=dict)
    """Set a parameter of task(). May be repeated."""

    def __post_init__(self) -> None:
        knob.check(self)
        if self.resume and (self.fresh or self.run is None):
            raise UsageError("resume-without-run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How the launcher watches ranks and handles faults. Raises UsageError for invalid values."""

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
    grace: Annotated[float, Knob("faults", unit="SECONDS", least=0)] = 30
    """Seconds that a script's own signal handlers have when the launcher is asked to stop."""
    debug: Annotated[bool, Knob("debug")] = False
    """Write messages of NCCL and torch, and a line for each collective, to the ranks' logs."""
    cold: Annotated[bool, Knob("debug")] = False
    """Start a new Python process for each rank, in place of a fork that has imported torch."""

    def __post_init__(self) -> None:
        knob.check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machines of a run: those of a Ray cluster, or a fixed set of nodes."""

    ray: Annotated[
        str | None,
        Knob(
            "cluster",
            unit="[HOST:PORT]",
            default="no cluster",
        ),
    ] = None
    """Run on a Ray cluster. Without HOST:PORT: the cluster of RAY_ADDRESS, or of this host."""
    nodes: Annotated[int | None, Knob("cluster", unit="N")] = None
    """Number of nodes in a fixed set. Give the same command on each node."""
    node_rank: Annotated[int | None, Knob("cluster", unit="K")] = None
    """Index of this node, from 0 to nodes - 1."""
    rdzv_endpoint: Annotated[str | None, Knob("cluster", unit="HOST:PORT")] = None
    """Address of node 0 and a free port on it, the same on all nodes."""
