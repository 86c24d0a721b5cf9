"""How ranks are started: where, on which run directory, what happens on a fault. None of it
changes a training.
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
    """Which run `lockstep train` begins or resumes, on how many ranks. Raises UsageError for
    values that cannot work.
    """

    workers: Annotated[
        int | str | None,
        Knob(
            "run", unit="N|N:M", default="the GPUs, else 1", flags=("--workers", "-n"), common=True
        ),
    ] = None
    """Ranks over all hosts; N:M starts at most M, and continues with no fewer than N where some
    are killed.
    """
    run: Annotated[
        Path | None, Knob("run", unit="DIR", default="runs/TASK-DATE-TIME", common=True)
    ] = None
    """Run directory; an unfinished run in it is resumed."""
    resume: Annotated[bool, Knob("run", common=True)] = False
    """Fail if the run in --run DIR cannot be resumed."""
    fresh: Annotated[bool, Knob("run")] = False
    """Train from the start in --run DIR; what is there is moved into before-1."""
    overrides: Annotated[
        Mapping[str, str], Knob("run", unit="KEY=VALUE", flags=("--set",), common=True)
    ] = field(default_factory=dict)
    """Set a parameter of task(); may be repeated."""
    multirun: Annotated[Mapping[str, str], Knob("run", unit="KEY=V1,V2")] = field(
        default_factory=dict
    )
    """Train once for each value of a task() parameter; if repeated, for each combination."""
    settings_file: Annotated[Path | None, Knob("run", unit="FILE", flags=("--settings",))] = None
    """Load reduce, update, threads, loader workers and bucket size from a `lockstep tune` file."""

    def __post_init__(self) -> None:
        knob.check(self)
        if self.resume and (self.fresh or self.run is None):
            raise UsageError("resume-without-run")
        if self.resume and self.multirun:
            raise UsageError("multirun-alone", other="--resume")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How ranks are watched. Raises UsageError for values that cannot work."""

    max_restarts: Annotated[
        int | None, Knob("faults", least=0, default="3 with N:M workers, else 0")
    ] = None
    """Restarts after a worker is killed or a node is lost."""
    timeout: Annotated[
        float | None, Knob("faults", unit="SECONDS", above=0, default="30 minutes")
    ] = None
    """Longest time that one collective may take."""
    on_stall: Annotated[OnStall, Knob("faults")] = "abort"
    """On a stall: warn, abort, or restart."""
    stall_after: Annotated[float, Knob("faults", unit="SECONDS", above=0)] = 30
    """Seconds without progress before a stall is declared; more where the run needs it."""
    on_corruption: Annotated[OnCorruption, Knob("faults")] = "abort"
    """When --witness finds a wrong result: end, or resume without that node (--ray)."""
    debug: Annotated[bool, Knob("debug")] = False
    """Write what NCCL and torch do, and a line for every collective, to the ranks' logs."""
    cold: Annotated[bool, Knob("debug")] = False
    """Start a fresh Python for every rank, in place of a fork that has imported torch."""

    def __post_init__(self) -> None:
        knob.check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Other machines that take part: those of a Ray cluster, or a fixed set of nodes."""

    ray: Annotated[
        str | None,
        Knob(
            "cluster",
            unit="[HOST:PORT]",
            default="no cluster; without an address, RAY_ADDRESS or this host's",
        ),
    ] = None
    """Run on the nodes of a Ray cluster."""
    nodes: Annotated[int | None, Knob("cluster", unit="N")] = None
    """Nodes of a fixed set; give the same command on each of them."""
    node_rank: Annotated[int | None, Knob("cluster", unit="K")] = None
    """Number of this node, from 0."""
    rdzv_endpoint: Annotated[str | None, Knob("cluster", unit="HOST:PORT")] = None
    """Address and a free port of node 0, the same on all nodes."""
