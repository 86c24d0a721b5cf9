"""Options of commands that start ranks: which run, with which task's parameters, on which machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.errors import UsageError


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
