"""`lockstep bench scaling`: speedup and efficiency at several numbers of workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.given import at_least_one, task_of
from lockstep.cli.over_run import DeviceName, LoaderWorkers, TaskName
from lockstep.errors import ExitCode, UsageError, WorkerFailed
from lockstep.measure.files import check_plot, check_writable, write_json


def scaling(
    task: TaskName,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N,N,...",
            show_default=False,
            help="Numbers of ranks on this host, the first the base; default: 1, 2, 4, ... up to its GPUs, else its cores.",
        ),
    ] = None,
    strong: Annotated[bool, typer.Option("--strong", help="The task's global batch at every number of workers (the default).")] = False,
    weak: Annotated[bool, typer.Option("--weak", help="The batch of a rank stays: the global batch grows with the workers.")] = False,
    both: Annotated[bool, typer.Option("--both", help="Both, in turns.")] = False,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 10,
    rounds: Annotated[int, typer.Option(help="Turns of each number of workers.")] = 5,
    threads: Annotated[
        int | None, typer.Option(show_default=False, help="Intra-op threads of each rank; default: the cores shared among the ranks.")
    ] = None,
    loading: Annotated[bool, typer.Option("--loading/--no-loading", help="Time the loading of batches too, as a training has it.")] = True,
    loader_workers: LoaderWorkers = 0,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="A parameter of task(); may be repeated.")
    ] = None,
    device: DeviceName = "auto",
    reduce: Annotated[str, typer.Option(metavar="HOW", help="How gradients are summed, as in `lockstep train`.")] = "auto",
    compress: Annotated[
        str | None, typer.Option(metavar="HOW", show_default=False, help="bf16, int8, ..., as in `lockstep train`.")
    ] = None,
    update: Annotated[str, typer.Option(metavar="replicated|sharded", help="Who applies them.")] = "replicated",
    exact: Annotated[bool, typer.Option("--exact", help="Sum in an order that gives the same bits at any number of workers.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the figures to this file, too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw speedup and efficiency, .png or .svg.")
    ] = None,
) -> None:
    """How much faster more workers train TASK: samples a second, speedup and efficiency, the numbers of workers in turns.

    Efficiency is the speedup over how many times the base's workers there are. Beside it stands what was predicted, from one rank's work
    measured alone and the link between two ranks.
    """
    mode, counts = _mode(strong, weak, both), _counts(workers)
    at_least_one(steps=steps, rounds=rounds, threads=threads)
    place, overrides = task_of(task, override)
    check_writable(json_file, "--json")
    check_plot(plot)
    from lockstep.measure.scaling.benchmark import benchmark_scaling

    try:
        found = benchmark_scaling(
            place,
            counts or _powers_of_two(device),
            mode=mode,
            steps=steps,
            rounds=rounds,
            device=device,  # type: ignore[arg-type]  # text from the command line: Settings refuses what it does not know
            threads=threads,
            loading=loading,
            loader_workers=loader_workers,
            reduce=reduce,  # type: ignore[arg-type]
            compress=compress,
            update=update,
            exact=exact,
            overrides=overrides,
        )
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from None
    print(found.describe())
    write_json(json_file, found.as_json())
    if plot is not None:
        found.plot(plot)


def _mode(strong: bool, weak: bool, both: bool) -> str:
    given = [name for name, value in (("strong", strong), ("weak", weak), ("both", both)) if value]
    if len(given) > 1:
        raise UsageError(f"--{' --'.join(given)}: give one of them; --both measures strong and weak scaling")
    return given[0] if given else "strong"


def _counts(text: str | None) -> list[int] | None:
    """`1,2,4`."""
    if text is None:
        return None
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(
            f"--workers {text or repr(text)}: give numbers of workers, each at least 1, with commas between them, such as 1,2,4"
        )
    return found


def _powers_of_two(device: str) -> list[int]:
    """1, 2, 4, ... up to the GPUs, else the cores; at least two numbers on a CPU."""
    from lockstep.cores import cores
    from lockstep.launcher import agent  # imports torch

    gpus = 0 if device == "cpu" else agent.gpus()
    return [2**power for power in range((gpus or max(2, cores())).bit_length())]
