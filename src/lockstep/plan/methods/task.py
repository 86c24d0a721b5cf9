"""What a plan must know of a task: its gradients, the micro-batches of a rank, and how long a rank computes in a step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from lockstep.cores import cores
from lockstep.launcher.spawn import launch
from lockstep.measure.given import feed
from lockstep.measure.ways import Loop, Setting
from lockstep.plan.methods.cost import Gradients
from lockstep.plan.methods.gradients import gradients_of
from lockstep.plan.tasks.of_task import slots_of
from lockstep.task import Task
from lockstep.training.build import model_of
from lockstep.training.forward import matmul_precision
from lockstep.training.threads import intra_op_threads
from lockstep.world import init

_WARM_UP, _STEPS = 3, 10


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's, of a step."""

    gradients: Gradients
    micro_batches: int
    """Of the rank that has most."""


def work_of(task: Task, workers: int) -> Work:
    """From the task's own model and sizes; nothing is computed."""
    return Work(gradients_of(model_of(task)), -(-slots_of(task) // workers))


def seconds_of(source: Callable[[], Task], micro_batches: int, workers: int) -> float:
    """A step of so many micro-batches with the optimizer's, in one process that talks to nobody: the median of a few. Raises WorkerFailed.

    With the intra-op threads that each of so many ranks would have on this host.
    """
    threads = max(1, cores() // workers)
    return float(launch(_measure, workers=1, args=(source, micro_batches, threads))[0])


def _measure(source: Callable[[], Task], micro_batches: int, threads: int) -> float:
    task = source()
    with init(backend="gloo") as world, intra_op_threads(threads), matmul_precision(task.precision):
        given = [replace(each, batches=each.batches[:micro_batches]) for each in feed(task, task.precision, world, weighed=False).given]
        way = Loop(Setting(task=task, world=world, precision=task.precision, steps=_WARM_UP + _STEPS, keyed=False))
        taken = []
        for turn in range(_WARM_UP + _STEPS):
            begin = perf_counter()
            way(given[turn % len(given)])
            taken.append(perf_counter() - begin)
        return statistics.median(taken[_WARM_UP:])
