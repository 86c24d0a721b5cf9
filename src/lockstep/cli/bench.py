"""`lockstep bench`: measurements, as a table and as JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.arguments import JsonFile, TaskName, at_least_one, counts_of, fitted_to, task_of
from lockstep.cli.choices import RunChoice
from lockstep.cli.options import GroupedCommand, Only, command_of, spread
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.settings import Config, Device, Settings
from lockstep.errors import UsageError
from lockstep.runtime.cores import warn_if_busy
from lockstep.tools.timing.output_files import check_picture, check_writable, write_json

if TYPE_CHECKING:
    from lockstep.tools.bench.collectives import CollectiveTime


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """The options of `bench scaling`. Raises UsageError for values that cannot work."""

    workers: Annotated[
        str | None,
        Knob(
            "run",
            unit="N,N,...",
            flags=("--workers", "-n"),
            default="1, 2, 4, ... up to GPUs or cores",
        ),
    ] = None
    """Numbers of ranks on this host. The first one is the base of the speedup."""
    weak: Annotated[bool, Knob("run")] = False
    """Keep the batch of each rank, so that the global batch grows with the workers. Default: keep
    the global batch.
    """
    steps: Annotated[int, Knob("measurement", least=1)] = 10
    """Number of timed steps in a round."""
    rounds: Annotated[int, Knob("measurement", least=1)] = 5
    """Number of rounds for each number of workers."""
    loading: Annotated[bool, Knob("measurement", flags=("--loading/--no-loading",))] = True
    """Include the loading of batches in the time, as in training. Default: include it."""

    def __post_init__(self) -> None:
        knob.check(self)

    def counts(self, device: str) -> list[int]:
        """Return the numbers of ranks. Default: 1, 2, 4, ... up to the limit of the device."""
        if self.workers is None:
            return _powers_of_two(device)
        return counts_of(self.workers, "numbers of workers of at least 1, such as 1,2,4")


_SCALED = ("threads", "loader_workers", "device", "reduce", "compress", "update", "exact")


def scaling(
    task: TaskName,
    config: Annotated[Config, Only(*_SCALED)],
    choice: Annotated[RunChoice, Only("overrides")],
    turns: ScalingOptions,
    json_file: JsonFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--plot",
            metavar="FILE.svg",
            help="Draw speedup and efficiency into an SVG file.",
        ),
    ] = None,
) -> None:
    """Measure samples/s, speedup and efficiency of TASK at several numbers of workers.

    The numbers of workers alternate. Efficiency is the speedup divided by the growth in workers.
    """
    counts = turns.counts(config.device)
    task_path, overrides = task_of(task, choice.overrides)
    check_writable(json_file, "--json")
    check_picture(out)
    warn_if_busy()
    from lockstep.tools.bench.scaling import benchmark_scaling

    result = benchmark_scaling(
        task_path,
        counts,
        mode="weak" if turns.weak else "strong",
        steps=turns.steps,
        rounds=turns.rounds,
        loading=turns.loading,
        overrides=overrides,
        **{name: getattr(config, name) for name in _SCALED},
    )
    print(result.describe())
    write_json(json_file, result.as_json())
    if out is not None:
        result.plot(out)


def _powers_of_two(device: str) -> list[int]:
    """1, 2, 4, ... up to the GPUs, else the cores; at least two numbers on a CPU."""
    from lockstep.launcher.start import gpus as gpus_here
    from lockstep.runtime.cores import cores

    gpus = 0 if device == "cpu" else gpus_here()
    return [2**power for power in range((gpus or max(2, cores())).bit_length())]


app = typer.Typer(no_args_is_help=True)
app.command("scaling", cls=GroupedCommand)(spread(scaling))


@app.command("collectives", cls=GroupedCommand)
def collectives(
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", help="Number of ranks on this host.")
    ] = 2,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="FROM..TO", help="Smallest and largest size, in bytes. Each is 4 x the last."
        ),
    ] = "4K..64M",
    collective: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME]", help="Collectives to measure, such as broadcast,all_gather."
        ),
    ] = "all_reduce",
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Algorithms to measure: native, auto, central, ring, tree, ... Default: all.",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of timed runs. Default: as many as fit in a quarter of a second.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time the algorithms of a collective and the backend's own.

    The algorithms alternate, and every result is checked. The columns are those of nccl-tests.
    """
    bytes_per_rank = _sizes(sizes)
    at_least_one(workers=workers, runs=runs)
    check_writable(json_file, "--json")
    warn_if_busy()
    from lockstep.tools.bench.collectives import table  # imports torch

    rows = _times(collective, workers, bytes_per_rank, algorithms, runs)
    print(table(rows))
    write_json(json_file, {"rows": [row.as_json() for row in rows]})


def _times(
    kinds: str, workers: int, sizes: list[int], algorithms: str | None, runs: int | None
) -> list[CollectiveTime]:
    """Time these collectives. algorithms=None means all algorithms of each."""
    from lockstep.schedules.algorithms import algorithms_of
    from lockstep.tools.bench.collectives import KINDS, measure

    times: list[CollectiveTime] = []
    for kind in kinds.split(","):
        knob.chosen("collective", kind, KINDS)
        names = ["native", *algorithms_of(kind)]  # type: ignore[arg-type]
        if algorithms is not None and algorithms != "all":
            choices = [*names, "auto", "shared_memory"]
            names = algorithms.split(",")
            with knob.within(kind):
                for name in names:
                    knob.chosen("algorithm", name, choices)
        times += measure(kind, workers, sizes, names, runs)
    return times


@command_of(app, "train")
def train(
    task: TaskName,
    config: Annotated[Config, Only("device")],
    choice: Annotated[RunChoice, Only("overrides")],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help="Number of ranks on this host. Default: the number of GPUs, else 2.",
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Timed steps of each variant, after 3 for warm-up. The fastest take three times as many.",
        ),
    ] = 30,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Variants to measure: ddp:MB (torch's, with buckets of this size), wrapper"
            " (lockstep.DistributedDataParallel), stepper, sharded, weights (sharded, with one copy of"
            " the weights). Default: all, with ddp at 5, 25 and 100 MB.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Time one training step of TASK with Lockstep and with torch's DDP.

    The variants alternate on the same ranks, with the same micro-batches, with one thread and with the
    default number of threads. The time excludes loading. The last line is the command that trains as the
    fastest variant does.
    """
    task_path, overrides = task_of(task, choice.overrides)
    check_writable(json_file, "--json")
    settings = _settings(task_path, workers, steps, overrides, config.device)
    warn_if_busy()
    from lockstep.tools.bench import training_step
    from lockstep.training.resolve import resolve

    names = training_step.VARIANTS if variants is None else _variants(variants)
    source = partial(resolve, settings.task, settings.overrides)
    result = training_step.measure(source, settings, variants=names, steps=steps)
    print(training_step.text(result))
    if result.fastest is not None:
        row = result.fastest
        options = {**training_step.OPTIONS[row.variant], "threads": str(row.threads)}
        print(f"\n{_train_command(task, settings, options)}")
    write_json(json_file, result.as_json())


def _variants(text: str) -> list[str]:
    """Return the names of variants. Raises UsageError for an unknown name, and for one that is
    given twice.
    """
    from lockstep.tools.bench.training_step import OPTIONS

    names = text.split(",")
    for name in names:
        kind, colon, size = name.partition(":")
        if kind == "ddp" and colon:
            with knob.within(f"variant={name!r}"):
                knob.number("bucket", knob.value_of(size), above=0, unit="MB")
        else:
            knob.chosen("variant", name, ["ddp:MB", "wrapper", *OPTIONS])
        if names.count(name) > 1:
            raise UsageError("given-twice", where=f"variants={text}", name=name)
    return names


def _train_command(task: str, settings: Settings, options: Mapping[str, str]) -> str:
    """Return the `lockstep train` command for a task with these settings and options."""
    words = ["lockstep", "train", task, "--workers", str(settings.workers)]
    if settings.device != "auto":
        words += ["--device", settings.device]
    for name, value in settings.overrides.items():
        words += ["--set", f"{name}={value}"]
    for name, value in options.items():
        words += [knob.knobs(Config)[name].flags[0], value]
    return shlex.join(words)


def _settings(
    task: str, workers: int | None, steps: int, overrides: dict[str, str], device: Device
) -> Settings:
    """Return checked settings with one rank per GPU by default. Without GPUs the default is two
    ranks, the fewest that communicate.
    """
    from lockstep.launcher.start import gpus

    settings = fitted_to(workers, task=task, overrides=overrides, steps=steps, device=device)
    alone = workers is None and settings.workers == 1
    if alone and (device == "cpu" or not gpus()):
        settings = replace(settings, workers=2)
    return settings


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _sizes(text: str) -> list[int]:
    """Parse sizes in bytes: `4K..64M` is 4096, 16384, ...; a single size is a list of one."""
    size = r"([1-9]\d*)([KMG]?)"
    match = re.fullmatch(rf"{size}(?:\.\.{size})?", text.upper())
    first, last = 1, 0
    if match is not None:
        first = last = int(match[1]) * _UNITS[match[2]]
        if match[3]:
            last = int(match[3]) * _UNITS[match[4]]
    if first > last:
        expected = "FROM..TO in bytes, such as 4K..64M"
        raise UsageError("wrong-value", name="sizes", value=text, expected=expected)
    sizes = [first]
    while sizes[-1] * 4 <= last:
        sizes.append(sizes[-1] * 4)
    return sizes
