"""`lockstep bench scaling`: speedup and efficiency at several numbers of workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.arguments import JsonFile, TaskName, counts_of, task_of
from lockstep.cli.options import Only
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.launching import RunChoice
from lockstep.config.settings import Config
from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import check_plot, check_writable, write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """What is measured. Raises UsageError for values that cannot work."""

    workers: Annotated[
        str | None,
        Knob(
            "run",
            unit="N,N,...",
            flags=("--workers", "-n"),
            default="1, 2, 4, ... up to GPUs or cores",
        ),
    ] = None
    """Numbers of ranks on this host, the first the base."""
    strong: Annotated[bool, Knob("run")] = False
    """Keep the task's global batch at every number of workers, which is the default."""
    weak: Annotated[bool, Knob("run")] = False
    """Keep the batch of a rank: the global batch grows with the workers."""
    both: Annotated[bool, Knob("run")] = False
    """Measure strong and weak scaling, in turns."""
    steps: Annotated[int, Knob("measurement", least=1)] = 10
    """Timed steps of a turn."""
    rounds: Annotated[int, Knob("measurement", least=1)] = 5
    """Turns of each number of workers."""
    loading: Annotated[bool, Knob("measurement", flags=("--loading/--no-loading",))] = True
    """Time the loading of batches too, as a training has it."""

    def __post_init__(self) -> None:
        knob.check(self)

    @property
    def mode(self) -> str:
        given = [
            name
            for name, value in (("strong", self.strong), ("weak", self.weak), ("both", self.both))
            if value
        ]
        if len(given) > 1:
            raise UsageError(
                "options-exclude-each-other",
                one=f"--{given[0]}",
                other=f"--{given[1]}",
                reason="--both measures strong and weak scaling",
            )
        return given[0] if given else "strong"

    def counts(self, device: str) -> list[int]:
        """Numbers of ranks; where none are given 1, 2, 4, ... up to the device's."""
        if self.workers is None:
            return _powers_of_two(device)
        return counts_of(self.workers, "numbers of workers of at least 1, such as 1,2,4")


def scaling(
    task: TaskName,
    config: Annotated[
        Config, Only("threads", "loader_workers", "device", "reduce", "compress", "update", "exact")
    ],
    choice: Annotated[RunChoice, Only("overrides")],
    turns: ScalingOptions,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Draw speedup and efficiency, .png or .svg."
        ),
    ] = None,
) -> None:
    """How much faster more workers train TASK: samples a second, speedup and efficiency, the
    numbers of workers in turns.

    Efficiency is the speedup over how many times the base's workers there are. Beside it stands
    what was predicted, from one rank's work measured alone and the link between two ranks.
    """
    mode, counts = turns.mode, turns.counts(config.device)
    place, overrides = task_of(task, choice.overrides)
    check_writable(json_file, "--json")
    check_plot(plot)
    from lockstep.tools.bench.scaling.benchmark import benchmark_scaling

    found = benchmark_scaling(
        place,
        counts,
        mode=mode,
        steps=turns.steps,
        rounds=turns.rounds,
        device=config.device,
        threads=config.threads,
        loading=turns.loading,
        loader_workers=config.loader_workers,
        reduce=config.reduce,
        compress=config.compress,
        update=config.update,
        exact=config.exact,
        overrides=overrides,
    )
    print(found.describe())
    write_json(json_file, found.as_json())
    if plot is not None:
        found.plot(plot)


def _powers_of_two(device: str) -> list[int]:
    """1, 2, 4, ... up to the GPUs, else the cores; at least two numbers on a CPU."""
    from lockstep.launcher.server import gpus as gpus_here
    from lockstep.runtime.cores import cores

    gpus = 0 if device == "cpu" else gpus_here()
    return [2**power for power in range((gpus or max(2, cores())).bit_length())]
