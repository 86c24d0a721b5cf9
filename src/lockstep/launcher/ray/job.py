"""What a command asks of a Ray cluster, said once: the driver reads how many ranks and restarts,
the nodes what their ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.launcher.logs import Console
from lockstep.launcher.rank import Target
from lockstep.launcher.watch import Stalls


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function that every rank calls, in the place of a program. What it returns goes to the
    driver, pickled.
    """

    pickled: bytes
    """The function and its arguments. Only ranks and the driver know the modules of what is
    pickled: importing them takes seconds.
    """
    imports: Sequence[str]
    variables: Sequence[Mapping[str, str]] | None = None
    """Of each rank, if they have some of their own: then each is a fresh interpreter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One for the whole run, the same for all nodes."""

    cluster: str
    """Its address."""
    least: int
    most: int
    """Ranks over all nodes."""
    each: int | None = None
    """Ranks of a node, at most."""
    gpus: bool | None = None
    """Whether each rank takes a GPU, or a CPU; None: a GPU where the cluster has one."""
    restarts: int = 0

    target: Target
    call: Call | None = None
    environment: Mapping[str, str]
    """Variables for ranks, over the node's own."""
    folder: str
    """Where the ranks work; relative paths of `target` begin here. On a node without it, "":
    where the actor does, to which Ray has brought the code.
    """
    code: Path | None = None
    """The file of the task or script."""
    console: Console
    logs: Path | None = None
    mark: tuple[str, str] | None = None
    """A file in the run directory, and what the driver has written into it: all nodes must see
    it.
    """
    wanted: Path | None = None
    """The driver touches it when more nodes are ready: ranks end at their next checkpoint."""
    grow: Path | None = None
    """There where the ranks have ended for that."""
    stalls: Stalls = field(default_factory=Stalls)
    debug: bool = False
    cold: bool = False
    heeds: bool = False
    """Ranks save and leave when they are asked to stop."""

    @property
    def elastic(self) -> bool:
        return self.least < self.most and self.wanted is not None

    @property
    def brought(self) -> Path:
        """The folder that Ray brings to a node which has no folder in common with the driver."""
        return Path(self.folder) if self.code is None else self.code.parent

    def without_folder(self) -> Job:
        """The same for such nodes."""
        if self.code is None:
            return replace(self, folder="")
        target, name = self.target, self.code.name
        moved = (
            replace(target, script=name)
            if target.script is not None
            else replace(target, args=[*target.args, name], task=name)
        )
        return replace(self, folder="", target=moved)
