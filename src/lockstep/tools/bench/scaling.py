"""`lockstep.benchmark_scaling` measures how much faster more workers train a task on this host.

Each number of workers has a turn in every round, in new processes: a real training whose model is
discarded. After some untimed steps all ranks start the timed ones together, and the slowest rank
counts. The numbers of workers alternate, so other load on the host slows all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import Task, init, launch
from lockstep.errors import UsageError
from lockstep.runs import Settings
from lockstep.timing import trial
from lockstep.tools.bench.speedup import Scaling, Turn, remarks, rows
from lockstep.tools.bench.task_source import Source, make_task, source_of
from lockstep.tools.timing.in_turns import largest, settle
from lockstep.tools.timing.output_files import counted

Device = Literal["auto", "cpu", "cuda"]
WARM_UP = 3  # steps
_REPEATED = 4  # windows, if loading is not timed


def benchmark_scaling(
    task: Task | str | Path | Callable[[], Task] | tuple[Any, Any, Any],
    workers: Sequence[int],
    *more: Any,
    mode: str = "strong",
    steps: int = 10,
    rounds: int = 5,
    device: Device = "auto",
    threads: int | None = None,
    loading: bool = True,
    loader_workers: int = 0,
    reduce: Any = "auto",
    compress: str | None = None,
    update: str = "replicated",
    exact: bool = False,
    overrides: Mapping[str, str] | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
) -> Scaling:
    """Train at each number of workers in turns, on this host, and compare samples per second.

    Ranks are new processes, and the trained models are discarded. A script that calls this needs
    `if __name__ == "__main__":` around the call, because ranks import the script.

    Example::

        report = lockstep.benchmark_scaling("digits", workers=[1, 2], steps=20)
        print(report.describe())

    Args:
        task: a Task, a bundled name or a file, a function that returns a Task, or (model, dataset,
            loss): a module or a function that builds one, a map-style data set of (input, target),
            and loss(output, target). Other processes must be able to import all of it.
        workers: numbers of ranks, such as [1, 2, 4]. The first one is the base: its speedup and
            efficiency are 1.
        more: nothing. The call (model, dataset, [1, 2]) of many texts lacks the loss, and the
            error shows where it goes.
        mode: "strong": the global batch stays the same; "weak": the batch of a rank stays the same.
        steps, rounds: timed steps of a turn, and turns of each number of workers.
        threads: intra-op threads of each rank. None: an equal part of the cores, as in
            `lockstep train`.
        loading: also time the loading of batches, as in a training. False: repeat a few batches
            that are already loaded.
        device, loader_workers, reduce, compress, update, exact: as for `lockstep.train`; no server.
        overrides: parameters of task() in a file.
        global_batch, micro_batch, optimizer: for (model, dataset, loss) only. Default: SGD, and
            micro-batches of 32 samples (fewer for a small data set), one for each rank of the
            largest number of workers.

    Returns:
        A Scaling; its `describe()` is a table.

    Raises:
        UsageError: invalid values, or a task that cannot be sent to other processes.
        WorkerFailed: a rank failed.
    """
    if more:
        given = f"a {type(task).__name__} without a loss"
        raise UsageError("not-model-dataset-loss", given=given)
    counts = _checked(workers)
    if mode not in ("strong", "weak"):
        raise UsageError("unknown-choice", name="mode", value=mode, choices=("strong", "weak"))
    _check_count("steps", steps)
    _check_count("rounds", rounds)
    parts = {"global_batch": global_batch, "micro_batch": micro_batch, "optimizer": optimizer}
    growth = max(counts) / counts[0] if mode == "weak" else 1.0
    source = source_of(task, counts, growth, overrides, parts)
    settings = Settings(
        task="task",
        device=device,
        threads=threads,
        loader_workers=loader_workers,
        reduce=reduce,
        compress=compress,
        update=update,
        exact=exact,
    )
    settings = settings.replaced({"device": _kind(device, counts)})
    if settings.server:
        raise UsageError("server-not-measured", update=update)
    task_here = make_task(source)
    batches = global_batches(mode, task_here, counts)
    turns: dict[int, list[Turn]] = {count: [] for count in counts}
    for number in range(rounds):
        for count in counts if number % 2 == 0 else reversed(counts):
            timed = _TimedSteps(source, settings, batches[count], steps, loading)
            turns[count].append(launch(timed, count)[0])
    return _summary(task_here, turns, batches, settings, mode, steps, loading)


@dataclass(frozen=True, slots=True)
class _TimedSteps:
    """One turn, as a function for every rank."""

    source: Source
    settings: Settings
    global_batch: int
    steps: int
    loading: bool

    def __call__(self) -> Turn:
        """Return the samples of all ranks and the seconds of the slowest; equal on all ranks."""
        task = replace(self.source(), global_batch=self.global_batch)
        with init(device="cpu" if self.settings.device == "cpu" else None) as world:
            settings = self.settings.replaced({"workers": world.size})
            with trial(task, settings, world) as training:
                windows = training.windows()
                if not self.loading:
                    repeated = list(islice(windows, _REPEATED))
                    for window in repeated:
                        list(window)  # loads the batches, which the window keeps
                    windows = cycle(repeated)
                for _ in range(WARM_UP):
                    training.step(next(windows))
                training.start_together()
                settle(world)
                begin = perf_counter()
                results = [training.step(next(windows)) for _ in range(self.steps)]
                settle(world)
                return Turn(
                    samples=sum(sum(result.samples_by_rank) for result in results),
                    seconds=largest(perf_counter() - begin, world),
                    threads=torch.get_num_threads(),
                    reduction=training.stepper.reducer.reduction.name,
                )


def _checked(workers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of workers unchanged. Raises UsageError if there are none, if one is below
    1, or if one is given twice.
    """
    if isinstance(workers, str) or not isinstance(workers, Sequence) or not workers:
        expected = "numbers of workers to measure, such as 1,2,4; the first is the base"
        raise UsageError("wrong-value", name="workers", value=workers, expected=expected)
    for count in workers:
        _check_count("workers", count)
        if workers.count(count) > 1:
            shown = f"workers={','.join(map(str, workers))}"
            raise UsageError("given-twice", where=shown, name=count)
    return tuple(workers)


def _check_count(name: str, value: object) -> None:
    """Raise UsageError for anything but a whole number of at least 1."""
    if type(value) is not int or value < 1:
        expected = "a whole number of at least 1"
        raise UsageError("wrong-value", name=name, value=value, expected=expected)


def global_batches(mode: str, task: Task, workers: Sequence[int]) -> dict[int, int]:
    """Return the global batch for each number of workers. The first number is the base, with the
    task's own global batch. In weak scaling, every rank has as many samples as a rank of the base.

    Raises UsageError if weak scaling cannot give every rank the same whole number of micro-batches,
    or if the data set has too few samples for a step.
    """
    batches = dict.fromkeys(workers, task.global_batch)
    if mode == "weak":
        base, micro_batch = workers[0], task.micro_batch
        per_rank, rest = divmod(task.global_batch, base * micro_batch)
        if rest or not per_rank:
            raise UsageError(
                "weak-scaling-uneven",
                global_batch=task.global_batch,
                micro_batch=micro_batch,
                workers=base,
                each=task.global_batch / base,
            )
        batches = {count: per_rank * micro_batch * count for count in workers}
    length = getattr(task.train_data, "__len__", None)  # a stream has no length
    for count, batch in batches.items():
        if length is not None and batch > length():
            raise UsageError(
                "step-larger-than-data",
                workers=count,
                mode=mode,
                global_batch=batch,
                samples=length(),
            )
    return batches


def uneven(batches: Mapping[int, int], micro_batch: int) -> list[str]:
    """Return a sentence for each number of workers at which the micro-batches do not divide evenly:
    a step takes as long as the rank with the most of them.
    """
    sentences = []
    for workers, batch in batches.items():
        slots = -(-batch // micro_batch)
        least, more = divmod(slots, workers)
        if more:
            share = 100 * slots / (workers * (least + 1))
            sentences.append(
                f"{counted(workers, 'worker')}: {counted(slots, 'micro-batch', 'es')}, so"
                f" {counted(more, 'rank')} of {workers} have {least + 1} and the others {least}: a step"
                f" uses at most {share:.0f} % of the ranks"
            )
    return sentences


def _kind(device: Device, counts: Sequence[int]) -> Device:
    """Return the kind of device on which ranks compute. Raises UsageError if there are too few
    GPUs: ranks do not share one.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    if max(counts) > gpus:
        raise UsageError("too-few-gpus", workers=max(counts), gpus=gpus)
    return "cuda"


def _summary(
    task: Task,
    turns: Mapping[int, Sequence[Turn]],
    batches: Mapping[int, int],
    settings: Settings,
    mode: str,
    steps: int,
    loading: bool,
) -> Scaling:
    measured = rows(turns, steps)
    number = len(os.sched_getaffinity(0))
    on_cpu = settings.device == "cpu"
    name = f"the CPU ({counted(number, 'core')})"
    if not on_cpu:
        number = torch.cuda.device_count()
        name = f"{torch.cuda.get_device_name()} ({counted(number, 'GPU')})"
    warnings = remarks(measured, cores=number if on_cpu else None)  # GPUs are not shared
    *_, last = turns.values()
    return Scaling(
        task=task.name or "task",
        rows=measured,
        mode=mode,
        constant=_constant(mode, batches, task.micro_batch),
        where=f"{name}, torch {torch.__version__}",
        how=(
            f"{counted(len(last), 'turn')} of {counted(steps, 'step')} for each row, after"
            f" {WARM_UP} steps to warm up; loading is {'timed too' if loading else 'not timed'};"
            f" gradients by {last[0].reduction}"
        ),
        remarks=(*warnings, *uneven(batches, task.micro_batch)),
        cores=number,
        device=settings.device,
    )


def _constant(mode: str, batches: Mapping[int, int], micro_batch: int) -> str:
    """Describe what stays the same from one number of workers to the next."""
    workers, size = next(iter(batches.items()))
    unit = "global batch"
    if mode == "weak":
        unit = "batch of a rank"
        size //= workers
    slots = counted(-(-size // micro_batch), "micro-batch", "es")
    return f"{mode} scaling: the {unit} stays {size} ({slots} of {micro_batch})"
