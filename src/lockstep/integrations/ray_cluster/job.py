"""What the driver and the nodes of a Ray cluster tell each other: the job, and a node's facts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import lockstep
from lockstep.config.launching import Launch
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.logs import Console
from lockstep.launcher.rank import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """What the driver asks a node before the node takes part."""

    versions: Mapping[str, str]
    monotonic_ns: int
    same_code: bool
    """Whether the driver's folder is here too, with the same task or script in it."""


def versions() -> dict[str, str]:
    return {
        "lockstep": lockstep.__version__,
        "torch": version("torch"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def digest(file: Path) -> str:
    """Return the SHA-256 of a file's bytes; "" if there is no file."""
    return sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PickledCall:
    """A function that every rank calls, in place of a program. Its results go to the driver,
    pickled.
    """

    pickled: bytes
    """The function and its arguments. Only ranks and the driver import the modules that unpickling
    needs, because that takes seconds.
    """
    imports: Sequence[str]
    variables: Sequence[Variables] | None = None
    """The variables of each rank, if ranks have their own: then each is a fresh interpreter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The description of the whole run, the same for all nodes."""

    cluster: str
    """The cluster's address."""
    least: int
    most: int
    """Ranks over all nodes."""
    each: int | None = None
    """Maximum ranks per node."""
    gpus: bool | None = None
    """Whether each rank takes a GPU, or a CPU; None: a GPU where the cluster has one."""
    restarts: int = 0

    target: Target
    call: PickledCall | None = None
    environment: Variables
    """Variables for ranks. They replace the node's own."""
    folder: str
    """The folder in which ranks work; relative paths of `target` begin here. "" if a node lacks it:
    then ranks work in the actor's folder, to which Ray has brought the code.
    """
    code: Path | None = None
    """The file of the task or script."""
    console: Console
    logs: Path | None = None
    mark: tuple[str, str] | None = None
    """A file in the run directory, and its text, which the driver has written: all nodes must see
    it.
    """
    wanted: Path | None = None
    """A file that the driver creates once more nodes are ready: ranks end at the next checkpoint.
    """
    grow: Path | None = None
    """A file that exists if the ranks have ended for that reason."""
    launch: Launch = field(default_factory=Launch)
    heeds: bool = False
    """Whether ranks save and exit when they are asked to stop."""

    @property
    def brought(self) -> Path:
        """The folder that Ray brings to a node which has no folder in common with the driver."""
        return Path(self.folder) if self.code is None else self.code.parent

    def without_folder(self) -> Job:
        """Return the job for such nodes."""
        if self.code is None:
            return replace(self, folder="")
        name = self.code.name
        if self.target.script is not None:
            target = replace(self.target, script=name)
        else:
            target = replace(self.target, args=[*self.target.args, name], task=name)
        return replace(self, folder="", target=target)
