"""What `lockstep plan` was asked, and which options go together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.method import Method
    from lockstep.plan.simulation.failures import Failures

Kind = Literal["task", "methods", "model"]

MOST = 2**20  # ranks

_EVERY = {"workers", "network", "json_file"}
_WAYS = {"reduce", "compress", "update", "staleness", "sync_every", "outer", "mesh"}
_TAKES: dict[Kind, set[str]] = {
    "methods": _EVERY | {"task", "methods", "step_ms", "measured", "override"},
    "model": _EVERY | _WAYS | {"model", "device", "batch", "nodes_of"},
    "task": _EVERY
    | _WAYS
    | {"task", "nodes_of", "ranks_per_host", "weak", "mtbf", "checkpoint_cost", "restart", "storage", "loader_workers", "seconds"}
    | {"profile", "save_profile", "noise_scale", "override", "plot"},
}
_FAILURES = {"checkpoint_cost", "restart"}
_TOLD: dict[Kind, str] = {"methods": "--methods", "model": "--model", "task": "the plan of a task"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options, as they were given."""

    task: str | None
    workers: str | None
    network: str
    nodes_of: int
    ranks_per_host: str | None
    weak: bool
    reduce: str
    compress: str | None
    update: str
    staleness: str | None
    sync_every: int | None
    outer: str | None
    mesh: str | None
    mtbf: float | None
    checkpoint_cost: float
    restart: float
    storage: float | None
    loader_workers: int
    seconds: float
    profile: Path | None
    save_profile: Path | None
    noise_scale: bool
    methods: bool
    step_ms: float | None
    measured: Path | None
    model: str | None
    device: str | None
    batch: int | None
    override: list[str] | None
    json_file: Path | None
    plot: Path | None

    def counts(self, usual: str) -> list[int]:
        """The numbers of ranks, each once, growing."""
        return counts_of(usual if self.workers is None else self.workers)

    def method(self) -> Method:
        """Raises UsageError, as `lockstep train` does."""
        from lockstep.mesh.layout import Mesh
        from lockstep.method import Method

        return Method(
            reduce=self.reduce,
            compress=self.compress,
            update=self.update,
            staleness=self.staleness,
            sync_every=self.sync_every,
            outer=self.outer,
            mesh=None if self.mesh is None else Mesh.read(self.mesh),
        )

    def failures(self) -> Failures | None:
        from lockstep.plan.simulation.failures import Failures

        if self.mtbf is None:
            return None
        return Failures(mtbf=3600 * self.mtbf, checkpoint=self.checkpoint_cost, restart=self.restart)

    def per_host(self) -> int | None:
        """Ranks that share the cores of a host; None: all."""
        text = self.ranks_per_host
        if text == "all" or (text is None and self.network == "here"):
            return None
        if text is None:
            return self.nodes_of
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--ranks-per-host {text}: give the ranks that share one host's cores, at least 1, or all")
        return int(text)


def check_together(asked: Asked, given: Sequence[str]) -> Kind:
    """Which kind of plan it is. Raises UsageError for an option that this kind does not look at."""
    kind: Kind = "methods" if asked.methods else "model" if asked.model is not None else "task"
    if asked.task is None and kind != "model":
        raise UsageError("lockstep plan needs a TASK (digits, text, or a Python file), or --model and --device of the table")
    for name in given:
        if name not in _TAKES[kind]:
            raise UsageError(f"{_option(name)} does not go with {_TOLD[kind]}: leave one of them out")
        if name in _FAILURES and asked.mtbf is None:
            raise UsageError(f"{_option(name)} is about failures: give --mtbf HOURS too")
    if asked.profile is not None:
        for name in ("seconds", "save_profile"):
            if name in given:
                raise UsageError(
                    f"{_option(name)} with --profile {asked.profile}: nothing is measured where a profile is given; leave one out"
                )
    if not 0 < asked.seconds < math.inf:
        raise UsageError(f"--seconds {asked.seconds:g}: give a time above 0")
    if asked.storage is not None and not 0 < asked.storage < math.inf:
        raise UsageError(f"--storage {asked.storage:g}: give the samples a second that all ranks together are given, above 0")
    return kind


def counts_of(text: str) -> list[int]:
    """`512`, `1,2,4`, or `1..4096`: from the first on, doubled up to the last. Raises UsageError."""
    wrong = UsageError(f"--workers {text}: give a number of ranks such as 512, several such as 1,2,4, or powers of two such as 1..4096")
    if found := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = int(found[1]), int(found[2])
        if not 1 <= low <= high:
            raise wrong
        numbers = [low << power for power in range((high // low).bit_length()) if low << power <= high]
    elif all(part.isdecimal() for part in text.split(",")):
        numbers = sorted({int(part) for part in text.split(",")})
    else:
        raise wrong
    if numbers[0] < 1:
        raise UsageError(f"--workers {text}: give at least 1")
    if numbers[-1] > MOST:
        raise UsageError(f"--workers {text}: a plan goes up to {MOST} ranks")
    return numbers


def _option(name: str) -> str:
    return {"override": "--set", "json_file": "--json", "task": "TASK"}.get(name, f"--{name.replace('_', '-')}")
