"""How a task is run: what must not change the weights, except where it says so. The launcher writes it, every rank reads it.

One JSON file carries it from the command line to the ranks and stays in the run directory as the record of what was asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.balance import Balance
from lockstep.errors import UsageError
from lockstep.mesh.layout import Mesh
from lockstep.mesh.schedules import Schedule
from lockstep.method import Method, Reduce
from lockstep.task import PRECISIONS, Precision

Device = Literal["auto", "cpu", "cuda"]

FILE = "settings.json"
SPLITS = ("time", "parameters")
SCHEDULE = "1f1b"
METHOD = ("reduce", "exact", "compress", "update", "staleness", "sync_every", "outer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `lockstep train` was asked for. Raises UsageError, naming the option, for values that cannot work."""

    task: str
    """A bundled name or the path of a file."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """--set key=value: passed to `task(key=value)`, converted to the type that the parameter has there."""
    workers: int = 1
    """Ranks over all hosts."""
    epochs: int | None = None
    """None: the task's own."""
    steps: int | None = None
    """Optimizer steps in place of epochs."""
    device: Device = "auto"
    """auto: GPUs where there are any."""
    precision: Precision | None = None
    """None: the task's own. It changes the weights."""
    compile: bool | None = None
    """None: the task's own."""
    reduce: Reduce = "auto"
    """How gradients are summed. auto: through shared memory where all ranks are on the CPU of one host, else by the backend."""
    compress: str | None = None
    """In how many bits they travel: bf16, fp16, int8, powersgd:RANK, topk:SHARE. It changes the weights."""
    update: str = "replicated"
    """Who applies them: every rank everything, or each its share, with the same weights; or a server, without waiting for each other."""
    staleness: int | str | None = None
    """Of the server: steps that a rank may be ahead of the slowest, or inf."""
    sync_every: int | None = None
    """Steps that every rank takes on its own between two meetings. It changes the weights."""
    outer: str | None = None
    """What a meeting does: average, nesterov."""
    balance: str | None = None
    """Who computes how many of a step's micro-batches: auto, as fast as each rank is; 2,1,1, in proportion to these. None: all equally many."""
    mesh: str | None = None
    """How many ranks there are along each axis: data, shard, pipeline, tensor. None: data alone."""
    schedule: str = SCHEDULE
    """Of a pipeline: the order in which its stages run micro-batches (mesh/schedules.py)."""
    split: str = SPLITS[0]
    """Of a pipeline: whether its stages take equal time, or hold equally many parameters."""
    exact: bool = False
    """The same bits at any number of workers: sums along one tree, deterministic algorithms, one intra-op thread unless `threads` says another."""
    grow: bool = False
    """End at the next checkpoint, so that the launcher can go on with more workers."""
    grow_if_wanted: bool = False
    """The same, where the launcher has asked for it by then: over several hosts, one may come at any time."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next. None: as often as costs less than 2 % of the time."""
    checkpoints: str | None = None
    """A URL that fsspec knows, to which every checkpoint is copied, and from which a run directory without one goes on."""
    bucket_mb: float = 25
    """MiB of gradients that travel together; torch's wrapper calls it bucket_cap_mb."""
    threads: int | None = None
    """Intra-op threads of each rank. None: the cores of the host shared among its ranks, or OMP_NUM_THREADS."""
    loader_workers: int = 0
    """Processes of each rank that load data; 0: the rank itself."""
    allow_changes: bool = False
    """Resume an exact run although the task's code or samples have changed since its checkpoint."""
    settings_file: str | None = None
    """The file of `lockstep tune` that some of these were taken from; they are as good as given by hand."""

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "steps", "threads", "checkpoint_every"):
            value = getattr(self, name)
            if (value is not None or name == "workers") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: give a whole number of at least 1")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, int | float) or not 0 < self.bucket_mb < math.inf:
            raise UsageError(f"bucket_mb={self.bucket_mb!r}: give the MiB of a bucket, a number above 0")
        if self.epochs is not None and self.steps is not None:
            raise UsageError(f"epochs={self.epochs} and steps={self.steps} exclude each other: give the one that shall end the training")
        if isinstance(self.loader_workers, bool) or not isinstance(self.loader_workers, int) or self.loader_workers < 0:
            raise UsageError(f"loader_workers={self.loader_workers!r}: give a whole number, 0 to load in the rank itself")
        choices = {
            "device": ("auto", "cpu", "cuda"),
            "precision": (None, *PRECISIONS),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise UsageError(f"{name}={value!r} is unknown: choose one of {', '.join(choice for choice in known if choice)}")
        method = self.method()
        self._check_mesh()
        if self.balance is not None:
            self._check_balance(Balance.of(self.balance), method)
        if self.precision == "fp16" and (self.sync_every is not None or self.update.startswith("server")):
            raise UsageError("precision='fp16' needs one loss scale for all ranks, and these would each find their own: use bf16")

    def _check_mesh(self) -> None:
        grid = self.grid
        if self.split not in SPLITS:
            raise UsageError(f"split={self.split!r} is unknown: choose one of {', '.join(SPLITS)}")
        Schedule.read(self.schedule)
        if grid is None or grid.pipeline == 1:
            for name, default in (("schedule", SCHEDULE), ("split", SPLITS[0])):
                if getattr(self, name) != default:
                    raise UsageError(
                        f"{name}={getattr(self, name)!r} says how a pipeline runs, and there is none: give mesh='pipeline=2', say"
                    )
        if grid is None:
            return
        grid.check_size(self.workers)
        if self.grow or self.grow_if_wanted:
            raise UsageError(f"mesh={self.mesh!r} has a place for each of {grid.size} ranks: give that number of workers, and no range")
        check_parts(grid, self.precision, compile=self.compile)

    def _check_balance(self, balance: Balance, method: Method) -> None:
        balance.check(method, self.workers)
        if not balance.measured and (self.grow or self.grow_if_wanted):
            raise UsageError(
                f"balance={self.balance!r} has a number for each of {self.workers} workers: give that number of workers, and no range"
            )

    def on_one_host(self, workers: int) -> Settings:
        """With one host's ranks alone; a mesh is laid over all of them, and shares are dealt out among all."""
        return replace(self, workers=workers, mesh=None, balance=None, schedule=SCHEDULE, split=SPLITS[0])

    @property
    def grid(self) -> Mesh | None:
        return None if self.mesh is None else Mesh.read(self.mesh)

    def method(self) -> Method:
        """How the ranks' work becomes one training. Raises UsageError for what makes no sense together."""
        return Method(**{name: getattr(self, name) for name in METHOD}, mesh=self.grid)

    def differences(self, before: Settings) -> list[str]:
        """In what a run with these settings would be another training than one with those of `before`, in words."""
        decides = ["task", "overrides", "epochs", "steps", "precision", "compile", "exact"]
        decides += ["threads", "bucket_mb"] if self.exact else []  # in float32 the order of a sum, and so its last bits
        pairs = [(name, getattr(before, name), getattr(self, name)) for name in decides]
        ours, theirs = self.method().recipe(), before.method().recipe()
        pairs += [(name, theirs.get(name), ours.get(name)) for name in {**theirs, **ours}]
        return [f"{name} was {_shown(before)} and is {_shown(now)}" for name, before, now in pairs if before != now]

    def write(self, directory: Path) -> None:
        """As settings.json in `directory`."""
        new = directory / f"{FILE}.unfinished"
        new.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        new.replace(directory / FILE)

    @classmethod
    def read(cls, directory: Path) -> Settings:
        """From settings.json in `directory`. Raises UsageError where it is missing or not ours."""
        file = directory / FILE
        try:
            found: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read ({error}): {directory} is not a run directory of `lockstep train`") from None
        if not isinstance(found, dict):
            raise UsageError(f"{file} holds a {type(found).__name__}, not settings: it was not written by `lockstep train`")
        unknown = sorted(set(found) - {each.name for each in fields(cls)})
        if unknown or "task" not in found:
            wrong = f"{', '.join(unknown)} unknown to this version" if unknown else "no task named"
            raise UsageError(f"{file}: {wrong}; it was written by another version of Lockstep, or by hand")
        return cls(**found)


def check_parts(mesh: Mesh, precision: Precision | None, *, compile: bool | None) -> None:
    """Raise a UsageError for what a model in parts cannot be trained with."""
    if not mesh.only_data and precision == "fp16":
        raise UsageError(f"precision='fp16' with mesh={str(mesh)!r}: every part would find a loss scale of its own; use bf16")
    if not mesh.only_data and compile:
        raise UsageError(f"compile with mesh={str(mesh)!r}: parts of a model are not compiled; give --no-compile")


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def overrides_of(pairs: list[str]) -> dict[str, str]:
    """["lr=0.1", ...] as given to --set, as a dict. Raises UsageError for a pair without "=" and for a key given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair}: write it as --set key=value")
        if key.strip() in found:
            raise UsageError(f"--set {key.strip()} is given twice, as {found[key.strip()]!r} and as {value!r}: give it once")
        found[key.strip()] = value
    return found
