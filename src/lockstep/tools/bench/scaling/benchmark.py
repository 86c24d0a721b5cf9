"""`lockstep.benchmark_scaling` measures how much faster more workers train a task on this host.

Its argument is turned into a function that can be sent to every rank, and makes the task there.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.config import knob
from lockstep.config.parallelism import Reduce
from lockstep.config.settings import Device, Settings
from lockstep.config.task import Task
from lockstep.data.windows import counted
from lockstep.errors import TaskError, UsageError
from lockstep.launcher.call import for_ranks
from lockstep.runtime.cores import busy, cores, processor
from lockstep.tools.bench.scaling.prediction import Carried, step_seconds
from lockstep.tools.bench.scaling.speedup import Scaling, ScalingRow, remarks, rows
from lockstep.tools.bench.scaling.timing import WARM_UP, on_rank, run_teams
from lockstep.tools.bench.scaling.works import (
    Mode,
    TimedWork,
    Works,
    busiest,
    check_samples,
    check_workers,
    global_batches,
    in_words,
    modes_of,
    uneven,
)
from lockstep.training.resolve import locate, resolve

Source = Callable[[], Task]
MICRO_BATCH = 32  # samples, if the data set is large enough


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskParts:
    """A function that makes a task from a model, a data set and a loss."""

    model: Any
    """A module, of which every rank gets a copy, or a function that builds a module."""
    dataset: Any
    loss: Callable[[Any, Any], Tensor]
    global_batch: int
    micro_batch: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None

    def __call__(self) -> Task:
        return Task(
            name=(
                type(self.model).__name__
                if isinstance(self.model, nn.Module)
                else getattr(self.model, "__name__", "model")
            ),
            model=(
                partial(copy.deepcopy, self.model)
                if isinstance(self.model, nn.Module)
                else self.model
            ),
            train_data=self.dataset,
            loss=partial(_summed, self.loss),
            optimizer=self.optimizer or _sgd,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
        )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with a learning rate so low that the loss does not become nan while timing."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _summed(loss: Callable[[Any, Any], Tensor], output: Any, batch: Any) -> tuple[Tensor, float]:
    """Return the sum of the loss over the batch, and its number of samples. `loss` returns the mean
    over the batch, as torch's criteria do, or one element per sample.
    """
    found = loss(output, batch[1])
    count = len(batch[1])
    return (found * count if found.dim() == 0 else found.sum()), float(count)


def _same(task: Task) -> Task:
    return task


def source_of(
    given: Any,
    workers: Sequence[int],
    growth: float,
    overrides: Mapping[str, str] | None,
    parts: Mapping[str, Any],
) -> Source:
    """Return a function that makes the task. `given`: a Task, a name or file, a function that
    returns a Task, or (model, dataset, loss). Only the last allows values in `parts`.

    `growth`: by how much the global batch grows at the largest number of workers. Raises
    UsageError, also for an object that cannot be sent to ranks.
    """
    if overrides and not isinstance(given, str | Path):
        raise UsageError("overrides-without-file", overrides=dict(overrides))
    if isinstance(given, tuple):
        return _portable(_from_parts(given, workers, growth, parts))
    for name, value in parts.items():
        if value is not None:
            raise UsageError("not-for-a-task", name=name, value=value)
    if isinstance(given, str | Path):
        return partial(resolve, locate(str(given)), dict(overrides or {}))
    if isinstance(given, Task):
        return _portable(partial(_same, given))
    if callable(given) and not isinstance(given, nn.Module):
        return _portable(given)
    raise UsageError("not-a-task-source", kind=type(given).__name__)


def _from_parts(
    given: tuple[Any, ...], workers: Sequence[int], growth: float, parts: Mapping[str, Any]
) -> TaskParts:
    if len(given) != 3:
        raise UsageError("not-model-dataset-loss", given=f"a tuple of {len(given)}")
    model, dataset, loss = given
    if not (isinstance(model, nn.Module) or callable(model)) or not callable(loss):
        kinds = f"({type(model).__name__}, ..., {type(loss).__name__})"
        raise UsageError("not-model-dataset-loss", given=kinds)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError("dataset-not-map-style", kind=type(dataset).__name__)
    most = max(workers)
    micro_batch, global_batch = parts["micro_batch"], parts["global_batch"]
    if micro_batch is None:
        fits = (
            int(len(dataset) // (most * growth))
            if global_batch is None
            else math.ceil(global_batch / most)
        )
        micro_batch = max(1, min(MICRO_BATCH, fits))
    return TaskParts(
        model=model,
        dataset=dataset,
        loss=loss,
        global_batch=most * micro_batch if global_batch is None else global_batch,
        micro_batch=micro_batch,
        optimizer=parts["optimizer"],
    )


def _portable(source: Source) -> Source:
    """Return the source, or raise UsageError if it cannot be sent to ranks. Ranks are new
    processes: the source is pickled, and they import its functions by name.
    """
    try:
        for_ranks(source)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError("task-not-portable", reason=str(error)) from None
    return source


def made(source: Source) -> Task:
    """Make the task in this process. Raises TaskError if the function returns something else."""
    found: Any = source()
    if not isinstance(found, Task):
        raise TaskError("function-without-task", kind=type(found).__name__)
    return found


def benchmark_scaling(
    task: Task | str | Path | Callable[[], Task] | tuple[Any, Any, Any],
    workers: Sequence[int],
    *,
    mode: str = "strong",
    steps: int = 10,
    rounds: int = 5,
    device: Device = "auto",
    threads: int | None = None,
    loading: bool = True,
    loader_workers: int = 0,
    reduce: Reduce = "auto",
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
        mode: "strong": the global batch stays the same; "weak": the batch of a rank stays the same;
            "both".
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
    counts, modes = check_workers(workers), modes_of(mode)
    knob.whole("steps", steps)
    knob.whole("rounds", rounds)
    parts = {"global_batch": global_batch, "micro_batch": micro_batch, "optimizer": optimizer}
    source = source_of(
        task, counts, max(counts) / counts[0] if "weak" in modes else 1.0, overrides, parts
    )
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
    settings = replace(settings, device=_kind(device, counts))
    if settings.method().server:
        raise UsageError("server-not-measured", update=update)
    task_here = made(source)
    works = _works(task_here, counts, modes, settings)
    return _Measurement(
        task=task_here, works=works, settings=settings, steps=steps, rounds=rounds, loading=loading
    ).run(source)


def _works(task: Task, counts: Sequence[int], modes: Sequence[Mode], settings: Settings) -> Works:
    batches = {
        mode: global_batches(mode, task.global_batch, task.micro_batch, counts) for mode in modes
    }
    length = getattr(task.train_data, "__len__", None)  # a stream has no length
    if length is not None:
        for mode in modes:
            check_samples(length(), batches[mode], mode)
    return Works(
        batches=batches,
        micro_batch=task.micro_batch,
        threads={count: _threads(settings, count) for count in counts},
    )


def _threads(settings: Settings, workers: int) -> int:
    """Return the threads of each rank, as `lockstep.init` would set them: the user's number, or an
    equal part of this host's cores.
    """
    if settings.threads is not None or settings.exact:
        return settings.threads or 1
    return (
        torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") else max(1, cores() // workers)
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measurement:
    """The works, and the settings for timing them."""

    task: Task
    works: Works
    settings: Settings
    steps: int
    rounds: int
    loading: bool

    def run(self, source: Source) -> Scaling:
        before = busy()
        works = self.works.all()
        teams = sorted({work.workers for work in works})
        links = next((size for size in teams if size > 1), None)
        answers = run_teams(
            on_rank,
            teams,
            (source, self.settings, works, self.steps, self.rounds, self.loading, links),
        )
        turns = {
            works[number]: taken for answer in answers for number, taken in answer.turns.items()
        }
        link = next(
            (answer.carried.link for answer in answers if answer.carried.link is not None), None
        )
        known = replace(answers[-1].carried, link=link)
        found = tuple(row for mode in self.works.batches for row in self._rows(mode, turns, known))
        number = cores() if self.settings.device == "cpu" else torch.cuda.device_count()
        batches, micro_batch = self.works.batches, self.task.micro_batch
        told = remarks(found, cores=number, device=self.settings.device, busy=before)
        return Scaling(
            task=self.task.name or "task",
            rows=found,
            modes={mode: in_words(mode, batches[mode], micro_batch) for mode in batches},
            where=_where(number, self.settings.device),
            how=self._how(known),
            remarks=(
                *told,
                *(line for mode in batches for line in uneven(mode, batches[mode], micro_batch)),
            ),
            cores=number,
            device=self.settings.device,
        )

    def _rows(
        self, mode: Mode, turns: Mapping[TimedWork, Sequence[tuple[int, float]]], known: Carried
    ) -> list[ScalingRow]:
        """Return the rows of one mode."""
        taken, predicted = {}, {}
        for workers, batch in self.works.batches[mode].items():
            taken[workers] = turns[self.works.of(mode, workers)]
            step = step_seconds(
                known,
                self.settings.method(),
                workers=workers,
                alone=median(seconds for _, seconds in turns[self.works.alone(mode, workers)])
                / self.steps,
                micro_batches=busiest(batch, self.task.micro_batch, workers),
                threads=self.works.threads[workers],
                cores=cores() if self.settings.device == "cpu" else None,
            )
            predicted[workers] = batch / step
        return rows(mode, taken, predicted, self.works.threads, self.steps)

    def _how(self, known: Carried) -> str:
        loaded = "loading is timed too, as in training" if self.loading else "loading is not timed"
        words = (
            f"{counted(self.rounds, 'turn')} of {counted(self.steps, 'step')} for each row, after"
            f" {WARM_UP} steps to warm up; {loaded}"
        )
        if (link := known.link) is None:
            return words
        rate = "no limit" if math.isinf(link.bandwidth) else f"{link.bandwidth / 1e6:,.0f} MB/s"
        return (
            f"{words}\ngradients by {known.reduction}; predicted from one rank alone and a link of"
            f" {1e6 * link.latency:.0f} us and {rate}"
        )


def _where(number: int, device: Device) -> str:
    if device == "cpu":
        return f"the CPU ({processor()}, {counted(number, 'core')}), torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()} ({counted(number, 'GPU')}), torch {torch.__version__}"
