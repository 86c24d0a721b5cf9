"""The settings of a run. `Settings.differences` lists those that change the trained weights beyond
the rounding of sums.

The launcher writes them to one JSON file, and every rank reads it. The file stays in the run
directory as a record of the options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from lockstep.config import knob
from lockstep.config.balance import Balance
from lockstep.config.documented import documented
from lockstep.config.knob import Knob
from lockstep.config.left_out import LeftOut
from lockstep.config.mesh import Mesh, Schedule
from lockstep.config.parallelism import Parallelism
from lockstep.config.retention import Retention
from lockstep.config.task import Precision
from lockstep.errors import UsageError

Device = Literal["auto", "cpu", "cuda"]
LoggerName = Literal["wandb", "mlflow", "tensorboard", "csv"]

FILE = "settings.json"
_SCRIPT = " (a script)"
SCHEDULE: Schedule = "1f1b"


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class Config(Parallelism):
    """The options of a training that a user may choose. `lockstep train --help-all` lists them.

    Raises UsageError, naming the option, for an invalid value.
    """

    epochs: Annotated[int | None, Knob("run", least=1, default="the task's own", common=True)] = (
        None
    )
    """Number of passes over the training data."""
    steps: Annotated[int | None, Knob("run", least=1, common=True)] = None
    """Number of optimizer steps, in place of --epochs."""
    device: Annotated[Device, Knob("run", common=True)] = "auto"
    """Device of every rank. auto uses the host's GPUs if it has any."""
    skip: Annotated[str | None, Knob("training", unit="N:M,...")] = None
    """Leave out these steps, counted from 1. Nothing is computed or updated in them."""
    precision: Annotated[
        Precision | None, Knob("training", default="the task's own", common=True)
    ] = None
    """Precision of the forward pass. It changes the trained weights. tf32 has an effect only on
    hardware that supports it.
    """
    compile: Annotated[bool | None, Knob("training", default="the task's own")] = None
    """Compile the model with torch.compile."""
    threads: Annotated[
        int | None,
        Knob("training", least=1, default="the host's cores that are free, divided by its ranks"),
    ] = None
    """Number of intra-op threads of each rank."""
    loader_workers: Annotated[int, Knob("training", least=0)] = 0
    """Number of processes per rank that load data. 0 loads in the rank itself."""
    balance: Annotated[str | None, Knob("gradients", unit="2,1,1", default="equal shares")] = None
    """Divide micro-batches among ranks in proportion to one number for each rank."""
    bucket_mb: Annotated[float, Knob("gradients", unit="MiB", above=0)] = 25
    """Size of a gradient bucket, in MiB. The gradients of a bucket are sent together."""
    schedule: Annotated[Schedule, Knob("model split")] = SCHEDULE
    """Order in which a pipeline runs its micro-batches."""
    log: Annotated[
        Sequence[str],
        Knob("run", unit="|".join(get_args(LoggerName)), default="tensorboard, if it is installed"),
    ] = ()
    """Loggers that receive the metrics, separated by commas. May be repeated."""
    checkpoint_every: Annotated[
        int | None,
        Knob(
            "checkpoints",
            unit="STEPS",
            least=1,
            default="as often as costs less than 2 % of the time",
            common=True,
        ),
    ] = None
    """Optimizer steps between two checkpoints."""
    keep: Annotated[
        int | str | None,
        Knob("checkpoints", unit="N|all", default="the newest two, and fewer the older they are"),
    ] = None
    """Number of newest checkpoints to keep, or all. The best one stays too."""
    keep_bytes: Annotated[int | str | None, Knob("checkpoints", unit="SIZE")] = None
    """Most bytes of all checkpoints, such as 20GB. The oldest are removed; the newest stays."""
    checkpoints: Annotated[str | None, Knob("checkpoints", unit="URL")] = None
    """Copy every checkpoint to this URL (s3://..., or a folder), and resume from there."""
    allow_changes: Annotated[bool, Knob("checkpoints")] = False
    """Resume an --exact run even if the task's code or samples have changed since its
    checkpoint.
    """

    def __post_init__(self) -> None:
        Parallelism.__post_init__(self)
        object.__setattr__(self, "log", _loggers(self.log))
        Retention.of(self.keep, self.keep_bytes)
        if self.left_out.ranges and self.alone:
            raise UsageError("skip-does-not-fit", option=self.describe())
        if self.epochs is not None and self.steps is not None:
            raise UsageError("epochs-and-steps", epochs=self.epochs, steps=self.steps)
        if self.schedule != SCHEDULE and (self.mesh is None or self.mesh.pipeline == 1):
            raise UsageError("no-pipeline", schedule=self.schedule)
        if self.precision == "fp16" and self.alone:
            raise UsageError("fp16-with-several-scales", option=self.describe())
        if self.mesh is not None:
            check_parts(self.mesh, self.precision, compile=self.compile)

    @property
    def left_out(self) -> LeftOut:
        """The steps of `skip`."""
        return LeftOut.of(self.skip)

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with some values changed.

        Args:
            changes: new values, by the names of fields.

        Raises:
            UsageError: an unknown name, or an invalid value.
        """
        knob.known(knob.knobs(type(self)), changes, "config")
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Config):
    """The options that `lockstep train` was given, and those that its launcher adds. Raises
    UsageError for invalid values.
    """

    task: str
    """The name of a bundled task, or the path of a file."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Values of --set key=value. They are passed to `task(key=value)`, converted to the type of the
    parameter.
    """
    workers: Annotated[int, Knob("run", least=1)] = 1
    """Number of ranks over all hosts."""
    grow: bool = False
    """End at the next checkpoint, so that the launcher can resume with more workers."""
    grow_if_wanted: bool = False
    """The same, but only if the launcher has asked for it by then. In a run on several hosts a new
    host may join at any time.
    """

    def __post_init__(self) -> None:
        Config.__post_init__(self)
        if not isinstance(self.overrides, Mapping):
            raise UsageError(
                "wrong-value", name="overrides", value=self.overrides, expected="names and texts"
            )
        for name, text in {"task": self.task, **self.overrides}.items():
            if not isinstance(text, str):
                raise UsageError("wrong-value", name=name, value=text, expected="a text")
        if self.mesh is not None:
            self.mesh.check_size(self.workers)
            self._check_fixed_size("mesh")
        if self.balance is not None:
            Balance.of(self.balance).check(self, self.workers)
            self._check_fixed_size("balance")

    def _check_fixed_size(self, option: str) -> None:
        """Raise a UsageError if this option is for `workers` ranks, and more may come."""
        if self.grow or self.grow_if_wanted:
            value = str(getattr(self, option))
            raise UsageError("range-of-workers", name=option, value=value, workers=self.workers)

    @classmethod
    def of_script(cls, name: str, workers: int) -> Settings:
        """Return what a script's run has in place of the settings of a task."""
        return cls(task=name + _SCRIPT, workers=workers)

    @property
    def is_script(self) -> bool:
        """Whether a script has trained, whose loop decides what is trained."""
        return self.task.endswith(_SCRIPT)

    def method(self) -> Parallelism:
        """Return only the options of Parallelism."""
        return Parallelism(**knob.values_of(self, Parallelism))

    @classmethod
    def of(cls, config: Config, **own: Any) -> Settings:
        """Build Settings from the user's options and the launcher's own: task, workers, ..."""
        return cls(**knob.values_of(config, Config), **own)

    def differences(self, before: Settings) -> list[str]:
        """Describe each setting that decides the trained weights and differs from `before`."""
        names = ["task", "overrides", "epochs", "steps", "skip", "precision", "compile", "exact"]
        if self.exact:
            # these two decide the order of float32 sums, and so their last bits
            names += ["threads", "bucket_mb"]
        old = {name: getattr(before, name) for name in names} | before.recipe()
        new = {name: getattr(self, name) for name in names} | self.recipe()
        differences = []
        for name in old | new:
            was, now = old.get(name), new.get(name)
            if was != now:
                differences.append(f"{name} was {_shown(was)} and is {_shown(now)}")
        return differences

    def as_json(self) -> dict[str, Any]:
        """Return every field by its name, in the form that `read` loads."""
        values = knob.values_of(self, type(self))
        if self.mesh is not None:
            values["mesh"] = str(self.mesh)
        return values

    def write(self, directory: Path) -> None:
        """Write settings.json in `directory`."""
        new = directory / f"{FILE}.unfinished"
        new.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        new.replace(directory / FILE)

    @classmethod
    def read(cls, directory: Path) -> Settings:
        """Read settings.json in `directory`. Raises UsageError if it is missing or foreign."""
        file = directory / FILE
        try:
            content: Any = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(
                "not-a-run-directory", directory=str(directory), file=FILE, reason=str(error)
            ) from None
        wrong = ""
        if not isinstance(content, dict):
            wrong = f"it holds a {type(content).__name__}"
        else:
            unknown = sorted(set(content) - {field.name for field in fields(cls)})
            if unknown:
                wrong = f"it has {', '.join(unknown)}"
            elif "task" not in content:
                wrong = "it names no task"
        if wrong:
            raise UsageError("foreign-settings", file=str(file), wrong=wrong)
        return cls(**content)


def check_parts(
    mesh: Mesh, precision: Precision | None, *, compile: bool | None, average: bool = False
) -> None:
    """Raise a UsageError for an option that a split model does not support."""
    if mesh.only_data:
        return
    option = f"mesh={str(mesh)!r}"
    if precision == "fp16":
        raise UsageError("fp16-with-several-scales", option=option)
    if compile:
        raise UsageError("compile-with-mesh", mesh=str(mesh))
    if average:
        raise UsageError("average-does-not-fit", option=option)


def _loggers(value: Sequence[str]) -> tuple[str, ...]:
    """Return the names in "wandb,csv" or ["wandb", "csv"]. Raises UsageError for an unknown name,
    and for one that is given twice.
    """
    text = value if isinstance(value, str) else ",".join(map(str, value))
    names: list[str] = []
    for name in filter(None, map(str.strip, text.split(","))):
        knob.chosen("log", name, get_args(LoggerName))
        if name in names:
            raise UsageError("given-twice", where="log", name=name)
        names.append(name)
    return tuple(names)


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)
