"""`lockstep train`: a task on N ranks of this host or of several, a run directory, and one last line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import hosts, latest
from lockstep.cli.given import task_of
from lockstep.cli.hardware import fitted
from lockstep.cores import cores
from lockstep.errors import UsageError
from lockstep.load import busy

if TYPE_CHECKING:
    from lockstep.launcher.failures import Failure
    from lockstep.launcher.hosts.plan import Plan
    from lockstep.place import Placement
    from lockstep.settings import Settings
    from lockstep.training.run_directory import RunDirectory
    from lockstep.training.tuned import Tuned


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="digits, text, or a Python file whose task() returns a lockstep.Task.")],
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N|N:M",
            show_default=False,
            help="Ranks over all hosts; default: the GPUs, else 1. N:M: at most M, and no fewer than N where some are killed.",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(show_default=False, help="Default: the task's own.")] = None,
    steps: Annotated[int | None, typer.Option(show_default=False, help="Optimizer steps, in place of --epochs.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False, help="Default: runs/TASK-DATE-TIME.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Insist on going on with the run in --run DIR; without, it is gone on with if it can be.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Train anew in --run DIR; what is there is moved into before-1.")] = False,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Resume an --exact run although the task's code or samples have changed since its checkpoint."
        ),
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="STEPS", show_default=False, help="Default: as often as costs less than 2 % of the time.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Copy every checkpoint there (s3://..., a folder), and go on from there."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="How often a killed worker may begin the ranks anew; default: 3 with N:M, else 0."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", show_default=False, help="The longest that one collective may take; default: 30 minutes."),
    ] = None,
    on_stall: Annotated[
        str,
        typer.Option(metavar="wait|abort|restart", help="When no rank gets on: say who is waited for; end the run; begin it anew."),
    ] = "abort",
    stall_after: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long nothing must change for that; longer where the run needs it.")
    ] = 30,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="A parameter of task(); may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="auto: GPUs where there are any.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16|tf32", show_default=False, help="Default: the task's own.")
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", show_default=False, help="torch.compile the model; default: the task's own.")
    ] = None,
    reduce: Annotated[
        str | None,
        typer.Option(
            metavar="auto|native|central|ring|tree|halving_doubling|shared_memory|hierarchical",
            show_default=False,
            help="How gradients are summed; default: auto, through memory on one CPU host.",
        ),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(
            metavar="replicated|sharded|server",
            show_default=False,
            help="Who applies them: every rank all of them, the default; each its share; or a server, without waiting for each other.",
        ),
    ] = None,
    staleness: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|inf", show_default=False, help="Of the server: how far a rank may be ahead of the slowest; default: 4."
        ),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            metavar="bf16|fp16|int8|powersgd:RANK|topk:SHARE", show_default=False, help="How gradients travel; default: as they are."
        ),
    ] = None,
    sync_every: Annotated[
        int | None, typer.Option(metavar="STEPS", show_default=False, help="Steps that every rank takes alone between two meetings.")
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(metavar="average|nesterov", show_default=False, help="What a meeting makes of the replicas; default: average."),
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="auto|2,1,1",
            show_default=False,
            help="Ranks of different speed: micro-batches follow measured speed, or these numbers, one for each rank; default: all alike.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            show_default=False,
            help="Divide the model too: ranks along data, shard, pipeline, tensor, such as data=2,pipeline=2; their product is --workers.",
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(metavar="naive|gpipe|1f1b|interleaved[:N]|zero-bubble", help="The order in which a pipeline runs micro-batches."),
    ] = "1f1b",
    split: Annotated[str, typer.Option(metavar="time|parameters", help="In what a pipeline's stages are equal.")] = "time",
    exact: Annotated[
        bool, typer.Option("--exact", help="The same bits at any number of workers: one order of addition, deterministic algorithms.")
    ] = False,
    bucket_mb: Annotated[
        float | None, typer.Option(metavar="MIB", show_default=False, help="Gradients that travel together; default: 25.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(show_default=False, help="Intra-op threads of each rank; default: the cores shared among the ranks.")
    ] = None,
    loader_workers: Annotated[
        int | None, typer.Option(show_default=False, help="Processes of each rank that load data; default: 0, the rank itself.")
    ] = None,
    settings_file: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", show_default=False, help="Take these five from a file of `lockstep tune --out`."),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Have NCCL and torch write to the ranks' logs what they do, and add a line for every collective."),
    ] = False,
    nodes: hosts.Nodes = None,
    meet: hosts.Meet = None,
    node_rank: hosts.NodeRank = None,
    token: hosts.TokenFile = None,
    workers_per_node: hosts.WorkersPerNode = None,
    join_timeout: hosts.JoinTimeout = None,
) -> None:
    """Train TASK data-parallel on several ranks of this host, with --nodes of several, or as one rank where torchrun, srun or mpirun has started several.

    The number of ranks does not change the samples of a step. Progress goes to stderr; the one line on stdout is the last:
    what was trained, the metric, and a SHA-256 of the weights. Metrics, logs and checkpoints are in the run directory.
    """
    if resume and (fresh or run is None):
        raise UsageError("--resume goes on with the run of a directory: give --run DIR, and no --fresh")
    run = latest.run_of(run) if resume else latest.refused(run)
    from lockstep.balance import Balance
    from lockstep.launcher import asked
    from lockstep.launcher.foreign import rank_here, refuse_watching, work_as
    from lockstep.launcher.generations import RESTARTS, Workers, run_generations
    from lockstep.launcher.hosts.plan import Plan
    from lockstep.launcher.supervise import Outcome, Target, supervise
    from lockstep.launcher.watch import Stalls, timeout_for_ranks
    from lockstep.mesh.layout import Mesh
    from lockstep.settings import Settings
    from lockstep.training import result
    from lockstep.training.claim import claimed, finished_before
    from lockstep.training.run_directory import RESULT
    from lockstep.training.tuned import Tuned

    grid = None if mesh is None else Mesh.read(mesh)
    if grid is not None:
        if ":" in f"{workers}{nodes}":
            raise UsageError(f"--mesh {mesh} has a place for each of {grid.size} ranks: give that number of workers, and no range")
        workers = str(grid.size) if workers is None and nodes is None else workers
    weights = None if balance is None else Balance.of(balance).weights
    if weights is not None:
        if ":" in f"{workers}{nodes}":
            raise UsageError(
                f"--balance {balance} has a number for each of {len(weights)} ranks: give that number of workers, and no range"
            )
        workers = str(len(weights)) if workers is None and nodes is None else workers
    stalls = Stalls(then=on_stall, after=stall_after)  # type: ignore[arg-type]  # text: refused there if unknown
    environment = timeout_for_ranks(timeout)
    plan = Plan.read(
        nodes,
        meet=meet,
        node_rank=node_rank,
        token=token,
        workers=workers,
        workers_per_node=workers_per_node,
        join_timeout=join_timeout,
        restarts=max_restarts,
        after_stalls=stalls.then == "restart",
    )
    here = None if plan is not None else rank_here(workers)
    if here is not None:
        asked.listen()  # from the first moment on: what it has to load takes seconds
        refuse_watching(here, debug or max_restarts is not None or stalls != Stalls())
        os.environ.update(environment)
    place, overrides = task_of(task, override)
    knobs = {"reduce": reduce, "update": update, "bucket_mb": bucket_mb, "threads": threads, "loader_workers": loader_workers}
    given = {name: value for name, value in knobs.items() if value is not None}
    tuned = None if settings_file is None else Tuned.read(settings_file)
    settings = Settings(
        task=place,
        overrides=overrides,
        workers=_ranks(workers, here, plan, len(weights) if weights is not None else None if grid is None else grid.size),
        epochs=epochs,
        steps=steps,
        device=device,  # type: ignore[arg-type]  # text from the command line: Settings refuses what it does not know
        precision=precision,  # type: ignore[arg-type]
        compile=compile,
        exact=exact,
        compress=compress,
        staleness=staleness,
        sync_every=sync_every,
        outer=outer,
        balance=balance,
        mesh=mesh,
        schedule=schedule,
        split=split,
        checkpoint_every=checkpoint_every,
        checkpoints=checkpoints,
        allow_changes=allow_changes,
        settings_file=None if settings_file is None else str(settings_file),
        **{**(tuned.settings if tuned is not None else {}), **given},
    )
    if plan is not None:
        hosts.fits_here(plan, settings)
    if tuned is not None and (plan is not None or (here is not None and here.rank == 0)):
        _say_tuned(tuned, settings, given)
    if here is not None:
        from lockstep.training.as_rank import train_as_rank  # imports torch

        work_as(here, lambda: train_as_rank(settings, run, resume=resume, fresh=fresh), may_exit=False)
        return
    if run is not None and finished_before(settings, run, resume=resume, fresh=fresh):
        if not resume:
            print(f"run directory {run} holds this training, and it is finished; --fresh trains it again", file=sys.stderr)
        print(result.last_line(result.read(run / RESULT)))
        return

    def claim() -> RunDirectory:
        return claimed(settings, run, resume=resume, fresh=fresh)

    def finished(directory: RunDirectory) -> None:
        directory.check()
        if not directory.result.exists():
            raise UsageError(f"task {task!r} ended its process before the training was over: let task() return, and do not call sys.exit()")
        print(f"run directory: {directory.path}", file=sys.stderr, flush=True)
        print(result.last_line(result.read(directory.result)))

    if plan is not None:
        raise typer.Exit(hosts.train_over_hosts(plan, settings, claim, run, finished, environment=environment, debug=debug, stalls=stalls))
    with claim() as directory:
        if sys.stderr.isatty():  # what is imported now takes seconds
            ranks = "the ranks" if workers is None else f"{settings.workers} rank{'s' * (settings.workers > 1)}"
            print(f"starting {ranks} ...; run directory {directory.path}", file=sys.stderr, flush=True)
        settings = fitted(settings, count_workers=workers is None)
        if tuned is not None:
            _say_tuned(tuned, settings, given)
        crowded = _crowded(settings)
        target = Target(module="lockstep.training.worker", args=[str(directory.path.absolute())])
        allowed = Workers(settings.workers, settings.workers) if workers is None else Workers.read(workers)

        def generation(count: int) -> Outcome:
            directory.check()
            directory.grow.unlink(missing_ok=True)
            replace(settings, workers=count, grow=count < allowed.most).write(directory.path)
            logs = directory.path.absolute()
            return supervise(
                target,
                count,
                logs=logs,
                console="first",
                environment=environment,
                debug=debug,
                heeds=True,
                stalls=stalls,
                passing=leaves_nothing,
            )

        def leaves_nothing(failure: Failure) -> bool:
            """All that it has to say is printed: a run that never trained needs no directory for that."""
            return directory.made_here and not debug and failure.kind in ("exception", "usage") and not directory.trained

        restarts = (RESTARTS if allowed.elastic or stalls.then == "restart" else 0) if max_restarts is None else max_restarts
        outcome = run_generations(generation, allowed, restarts, directory.grow.exists, after_stalls=stalls.then == "restart")
        if not outcome.exit_code:
            if crowded is not None:
                print(crowded, file=sys.stderr)
            finished(directory)
        elif outcome.failure is not None and leaves_nothing(outcome.failure):
            directory.release(failed=True)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _ranks(workers: str | None, here: Placement | None, plan: Plan | None, asked_for: int | None) -> int:
    """Over all hosts, as far as this one knows; `asked_for` by a mesh, or by a share for each."""
    from lockstep.launcher.generations import Workers

    if here is not None:
        return here.size
    if plan is not None:  # what the hosts bring is known when they have met
        return 1 if asked_for is None else asked_for if plan.workers is None else plan.workers * plan.most
    return 1 if workers is None else Workers.read(workers).most


def _crowded(settings: Settings) -> str | None:
    """A warning for a busy host: threads of one rank wait at every operation for the one that another program has taken the core from."""
    threads = cores() // settings.workers
    chosen = settings.threads is not None or settings.exact or "OMP_NUM_THREADS" in os.environ
    if chosen or threads < 2 or (found := busy()) is None:
        return None
    from lockstep.launcher import agent  # imports torch

    if settings.device != "cpu" and agent.gpus():
        return None
    return f"warning: {found} at the start: the {threads} threads of a worker wait for each other on a busy host; --threads 1 may be faster"


def _say_tuned(tuned: Tuned, settings: Settings, given: Mapping[str, Any]) -> None:
    """One line on stderr for what came from the file, and a warning where it was made for something else."""
    from lockstep.training.resolve import short_name

    taken = {name: value for name, value in tuned.settings.items() if name not in given}
    beaten = {name: value for name, value in tuned.settings.items() if name in given}
    line = f"settings from {settings.settings_file}: {_listed(taken) or 'none'}"
    if beaten:
        line += f"; its {_listed(beaten)} gave way to {_listed({name: given[name] for name in beaten})} of the command line"
    print(line, file=sys.stderr)
    import torch  # as it was named there, build included

    device = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
    here = {"task": short_name(settings.task), "overrides": dict(settings.overrides), "workers": settings.workers, "device": device}
    if differences := tuned.measured.differences(**here, torch=torch.__version__):
        print(
            f"warning: {settings.settings_file} was measured on something else ({'; '.join(differences)}): what is applied may not be the "
            "fastest here; run `lockstep tune` again",
            file=sys.stderr,
        )


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
