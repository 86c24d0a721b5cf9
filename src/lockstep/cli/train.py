"""`lockstep train`: train a task on N ranks, on one host or several. It writes a run directory and
prints one last line.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from lockstep.cli import nodes
from lockstep.cli.arguments import TaskName, fitted, new_run, run_of, task_of
from lockstep.cli.choices import Cluster, RunChoice
from lockstep.config.launching import Launch
from lockstep.config.settings import Config, Settings
from lockstep.data.windows import counted
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores, running

if TYPE_CHECKING:
    from lockstep.launcher.fixed import Nodes
    from lockstep.launcher.supervise import Outcome, Workers
    from lockstep.runtime.environment import Placement
    from lockstep.runtime.failure_record import Failure
    from lockstep.training.run_directory import RunDirectory

COMMAND = nodes.Command


def train(
    task: TaskName,
    choice: RunChoice,
    config: Config,
    launch: Launch,
    cluster: Cluster,
) -> None:
    """Train TASK data-parallel on several ranks of this host, a Ray cluster, or a set of nodes.

    The number of ranks does not change the samples of a step. Metrics, logs and checkpoints go into
    the run directory, and progress goes to stderr. Stdout gets one line at the end: the task, its
    metric, and a SHA-256 of the weights. If torchrun, srun or mpirun starts this command, each
    process is one rank.

    \b
    Examples:
      lockstep train digits --workers 2              train on 2 ranks
      lockstep train digits -n 4 --exact             same bits at any number of ranks
      lockstep train my_task.py -n 2 --set lr=0.01   your task, with a parameter set
      lockstep train my_task.py --run runs/a         start the run in runs/a, or resume it
    """
    run = run_of(choice.run) if choice.resume else new_run(choice.run)
    choice = replace(choice, run=run)
    workers = _workers(choice, config)
    from lockstep.launcher.rank import rank_here

    placement: Placement | None = None  # as a rank of another launcher
    node_set: Nodes | None = None
    if launch.on_corruption == "exclude" and cluster.ray is None:
        raise UsageError("nothing-to-exclude", where="this host or a fixed set of nodes")
    if cluster.ray is not None:
        nodes.refuse_beside_ray(cluster)
        workers = nodes.ranks_on_ray(workers)
    else:
        if cluster.nodes is None:
            placement = rank_here(workers)
        if placement is None:
            node_set, count = nodes.fixed_set(cluster, workers)
            workers = None if count is None else str(count)
        else:
            _prepare_rank(placement, launch)
    task_path, overrides = task_of(task, choice.overrides)
    settings = Settings.of(
        config,
        task=task_path,
        overrides=overrides,
        workers=_ranks(workers, placement, node_set),
    )
    if placement is not None:
        _train_as_rank(placement, settings, choice)
    elif node_set is not None:
        _train_on_nodes(node_set, settings, choice, launch)
    elif not _finished(settings, choice):
        run_here = _Run(settings=settings, choice=choice, launch=launch, ray=cluster.ray)
        run_here.train(task, workers)


def _workers(choice: RunChoice, config: Config) -> str | None:
    """Return --workers, or the number of ranks that --mesh or --balance needs."""
    from lockstep.config.balance import Balance

    workers = None if choice.workers is None else str(choice.workers)
    counts = {}
    if config.mesh is not None:
        counts["mesh"] = config.mesh.size
    if config.balance is not None:
        counts["balance"] = len(Balance.of(config.balance).weights)
    for name, count in counts.items():
        if workers is not None and ":" in workers:
            value = str(getattr(config, name))
            raise UsageError("range-of-workers", name=name, value=value, workers=count)
        workers = workers or str(count)
    return workers


def _ranks(workers: str | None, placement: Placement | None, node_set: Nodes | None) -> int:
    """Return the number of ranks over all nodes, as far as it is known."""
    from lockstep.launcher.supervise import Workers

    if placement is not None:
        return placement.size
    if node_set is not None:
        return node_set.count * nodes.ranks_here(node_set)
    return 1 if workers is None else Workers.read(workers).most


# -- as one rank, or as one node -----------------------------------------------------------------


def _prepare_rank(placement: Placement, launch: Launch) -> None:
    from lockstep.launcher.rank import refuse_watching
    from lockstep.runtime import preemption
    from lockstep.runtime.environment import timeout_for_ranks

    preemption.listen()  # at once, because the imports that follow take seconds
    refuse_watching(placement, launch)
    os.environ.update(timeout_for_ranks(launch.timeout))


def _train_as_rank(placement: Placement, settings: Settings, choice: RunChoice) -> None:
    from lockstep.launcher.rank import work_as
    from lockstep.training.as_rank import train_as_rank  # imports torch

    program = partial(train_as_rank, settings, choice.run, resume=choice.resume, fresh=choice.fresh)
    work_as(placement, program, may_exit=False)


def _train_on_nodes(
    node_set: Nodes,
    settings: Settings,
    choice: RunChoice,
    launch: Launch,
) -> None:
    nodes.refuse_restarts(launch)
    from lockstep.launcher.supervise import supervise

    target = nodes.as_rank(settings, choice.run, resume=choice.resume, fresh=choice.fresh)
    with nodes.placed(node_set, launch.timeout) as (share, network):
        outcome = supervise(
            target,
            environment=network,
            launch=launch,
            heeds=True,
            share=share,
        )
    raise typer.Exit(outcome.exit_code)


# -- as the launcher of a run --------------------------------------------------------------------


def _finished(settings: Settings, choice: RunChoice) -> bool:
    """Whether this training is already finished in the run directory. If so, its last line is
    printed again.
    """
    from lockstep.training import result
    from lockstep.training.run_directory import RESULT, finished_before

    run = choice.run
    if run is None or not finished_before(settings, run, resume=choice.resume, fresh=choice.fresh):
        return False
    if not choice.resume:
        print(
            f"this training is already finished in {run}; --fresh trains it again",
            file=sys.stderr,
        )
    print(result.last_line(result.read(run / RESULT)))
    return True


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A training whose ranks this command starts and restarts, on this host or on a Ray cluster."""

    settings: Settings
    choice: RunChoice
    launch: Launch
    ray: str | None

    def train(self, task: str, workers: str | None) -> None:
        """Train, and print the last line. If the ranks fail, exit with their exit code."""
        from lockstep.launcher.supervise import Workers
        from lockstep.training.run_directory import claimed

        choice = self.choice
        settings = self.settings
        with claimed(settings, choice.run, resume=choice.resume, fresh=choice.fresh) as directory:
            if sys.stderr.isatty():  # the imports that follow take seconds
                ranks = "the ranks" if workers is None else counted(settings.workers, "rank")
                print(f"starting {ranks}: this takes some seconds ...", file=sys.stderr, flush=True)
            if self.ray is None:
                settings = fitted(settings, count_workers=workers is None)
                settings = _with_free_cores(settings, directory)
            allowed = Workers(settings.workers, settings.workers)
            if workers is not None:
                allowed = Workers.read(workers)
            outcome = replace(self, settings=settings)._start(directory, allowed)
            if not outcome.exit_code:
                _print_result(directory, task)
            elif outcome.failure is not None and self._is_useless(directory, outcome.failure):
                directory.release(failed=True)
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)

    def _start(self, directory: RunDirectory, allowed: Workers) -> Outcome:
        """Run the ranks until they end and are not restarted."""
        if self.ray is not None:
            return nodes.train_on_ray(
                self.ray, directory, self.settings, allowed, launch=self.launch
            )
        from lockstep.launcher.rank import Target
        from lockstep.launcher.supervise import run_with_restarts, supervise

        path = directory.path.absolute()
        target = Target(
            module="lockstep.training.worker", args=[str(path)], task=self.settings.task
        )

        def start(count: int) -> Outcome:
            directory.check()
            directory.grow.unlink(missing_ok=True)
            replace(self.settings, workers=count, grow=count < allowed.most).write(directory.path)
            outcome = supervise(
                target,
                count,
                logs=path,
                console="first",
                launch=self.launch,
                heeds=True,
                passing=partial(self._is_useless, directory),
            )
            grows = outcome.exit_code == 0 and directory.grow.exists()
            return replace(outcome, grows=grows)

        return run_with_restarts(start, allowed, self.launch)

    def _is_useless(self, directory: RunDirectory, failure: Failure) -> bool:
        """Whether a failed run needs no directory: it never trained, and its error is printed."""
        try:
            trained = directory.trained
        except OSError:  # the directory was removed or moved
            return True
        return (
            directory.made_here
            and not self.launch.debug
            and failure.kind in ("exception", "usage")
            and not trained
        )


def _print_result(directory: RunDirectory, task: str) -> None:
    from lockstep.training import result

    directory.check()
    if not directory.result.exists():
        raise UsageError("task-ended-its-process", task=task)
    print(result.last_line(result.read(directory.result)))


def _with_free_cores(settings: Settings, directory: RunDirectory) -> Settings:
    """Return the settings with the threads that a rank can keep busy beside other programs, if the
    user has left the number open: a thread without a core of its own holds the others up at every
    operation. A run that is resumed keeps its number.
    """
    threads = cores() // settings.workers
    chosen = settings.threads is not None or settings.exact or "OMP_NUM_THREADS" in os.environ
    if chosen or threads < 2:
        return settings
    before = Settings.read(directory.path).threads
    if before is not None:
        return replace(settings, threads=before)
    from lockstep.launcher.start import gpus

    programs = running(own=2)  # the fork server imports torch now
    total = os.cpu_count() or 1
    free = max(1, min(cores(), total - programs) // settings.workers)
    if free == threads or (settings.device != "cpu" and gpus()):
        return settings
    print(
        f"other programs keep {min(programs, total)} of {total} cores busy: a worker gets"
        f" {counted(free, 'thread')} in place of {threads} (--threads N sets the number)",
        file=sys.stderr,
        flush=True,
    )
    return replace(settings, threads=free)
