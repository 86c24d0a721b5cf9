"""Communication to computation of a task: its own model, its first micro-batch, its loss and precision, on one rank here."""

from __future__ import annotations

from collections.abc import Callable

from lockstep import randomness
from lockstep.collectives.network import Link
from lockstep.cores import cores
from lockstep.errors import UsageError
from lockstep.launcher.spawn import launch
from lockstep.measure.counted import Counted, counted
from lockstep.measure.ratio import CommunicationRatio, ratio_of
from lockstep.method import Method
from lockstep.plan.methods.cost import Gradients
from lockstep.plan.methods.gradients import gradients_of
from lockstep.plan.tasks.of_task import slots_of
from lockstep.task import Task
from lockstep.training.build import loader_of, model_of
from lockstep.training.forward import Forward, matmul_precision
from lockstep.training.threads import intra_op_threads
from lockstep.world import init


def ratio_of_task(
    source: Callable[[], Task], workers: int, *, network: str | Link, method: Method | None = None, told: str = "native"
) -> CommunicationRatio:
    """In one process that talks to nobody, with the threads that each of so many ranks has on this host. Raises UsageError and WorkerFailed."""
    threads = max(1, cores() // workers)
    name, work, gradients, samples, slots = launch(_on_rank, workers=1, args=(source, threads))[0]
    return ratio_of(
        name,
        work,
        gradients,
        samples=samples,
        world_size=workers,
        network=network,
        method=method or Method(),
        told=told,
        micro_batches=-(-slots // workers),
    )


def _on_rank(source: Callable[[], Task], threads: int) -> tuple[str, Counted, Gradients, int, int]:
    """The task's name, the work and the samples of a micro-batch, its gradients, and the micro-batches of a step."""
    task = source()
    with init(backend="gloo") as world, intra_op_threads(threads), matmul_precision(task.precision):
        randomness.shared(task.seed)
        model = model_of(task).to(world.device)
        forward = Forward(model, task, task.precision, world.device)
        window = next(iter(next(iter(loader_of(task, world).epochs(1)))), None)
        if window is None:
            raise UsageError("the dataset gives no micro-batch: there is nothing to compute")
        batch = window[0]
        work = counted(model, lambda: forward.loss(forward(batch), batch)[0])
        return task.name or "task", work, gradients_of(model), window.counts[0], slots_of(task)
