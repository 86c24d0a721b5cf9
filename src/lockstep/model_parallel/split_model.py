"""Build, cut and run this rank's part of a task's model on a mesh.

    build       the whole model, on the CPU, under the shared random stream: the weights are those
                of one process
    pipeline    keep this rank's stage, and free the rest (layers.py, split.py, stages.py)
    tensor      keep this rank's part of their matrices (tensor.py)
    shard       keep this rank's part of every parameter (sharded_parameters.py)

The result is a set of plain tensors of this rank (local.py). Stepper and optimizer use them as they
use a whole model. The ranks that hold one model compute their micro-batches together: one after the
other, or all at once through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.checks.divergence import Named
from lockstep.collectives.group import Group
from lockstep.config.mesh import Mesh
from lockstep.config.task import Task
from lockstep.data.device import to_device
from lockstep.data.evaluation_batches import DatasetRows, Piece
from lockstep.data.loader import is_iterable
from lockstep.errors import TaskError, UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.sharded_parameters import shard_parameters, take_part
from lockstep.model_parallel.split import ModelNames, TiedStages, cut
from lockstep.model_parallel.split_form import SplitForm, open_devices, sha256
from lockstep.model_parallel.split_norm import SplitNorm
from lockstep.model_parallel.stages import stage_module
from lockstep.model_parallel.tensor import plan_of, split_tensors
from lockstep.runtime import randomness
from lockstep.step.forward import Forward, as_float32, enter_stream, outputs
from lockstep.step.model_shard import ModelShard
from lockstep.step.stepper import Stepper
from lockstep.step.window_run import summed
from lockstep.world.world import World


@contextmanager
def buffers_stay(modules: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Raise a TaskError if a forward in this block changes a buffer.

    Such buffers are averaged by the weights of micro-batches, for whole models only. With a
    pipeline or shard axis they would differ between ranks, or never change. Without these axes,
    ranks with the same buffers compute the same samples, and nothing is checked.
    """
    if mesh.pipeline == 1 and mesh.shard == 1:
        yield
        return
    before = {name: (id(buffer), buffer._version) for name, buffer in modules.named_buffers()}
    yield
    for name, buffer in modules.named_buffers():
        if before.get(name) != (id(buffer), buffer._version):
            raise TaskError("buffer-changes-in-forward", mesh=str(mesh), buffer=name)


@dataclass(slots=True)
class InTurn:
    """Computes one micro-batch after the other. A rank of the shard axis with fewer micro-batches
    takes part in those of the others with zeros.
    """

    module: nn.Module
    mesh: Mesh
    share: int
    """Number of this rank's share of the data."""
    shard: Group
    example: Callable[[], Any]
    """Returns a micro-batch."""
    spare: Any = None
    """A micro-batch for `take_part`, if this rank has none left."""

    def train(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        # a collective: call it before the first forward, which waits for the other ranks
        lacking = self._lacking(len(window))
        for batch in stepper.micro_batches(window):
            with buffers_stay(self.module, self.mesh):
                output = forward(batch)
            loss, weight = forward.loss(output, batch)
            stepper.backward(loss, weight)
            self.spare = batch
        for _ in range(lacking):
            take_part(self.module, lambda: forward(self._spare_batch()))

    def _lacking(self, count: int) -> int:
        """Return how many micro-batches fewer than the busiest rank of the shard axis this rank
        has. Collective.
        """
        most = torch.tensor(count)
        self.shard.host.all_reduce(most, "max", place="for the number of micro-batches").wait()
        return int(most) - count

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        for piece, output in outputs(forward, rows, seed):
            self.spare = piece.batch
            yield piece, output
        # batches go to the shares in turn: the first shares may have one more
        more = rows.count % self.mesh.replicas
        if self.mesh.shard > 1 and 0 < more <= self.share:
            forward(self._spare_batch())

    def _spare_batch(self) -> Any:
        if self.spare is None:
            self.spare = self.example()
        return self.spare


@dataclass(frozen=True, slots=True)
class ThroughPipeline:
    """Computes all micro-batches of a window at once, in the order of the pipeline's schedule."""

    pipeline: Pipeline
    mesh: Mesh

    def train(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        run = stepper.open(window)
        batches = list(window)

        def loss(number: int, output: Any) -> Tensor:
            total, weight = forward.loss(as_float32(output), batches[number])
            total = summed(total, weight, "sum")
            run.add(number, total, weight)
            return total

        inputs = [forward.inputs(batch) for batch in batches]
        with run.interleaved(), buffers_stay(self.pipeline.stage, self.mesh):
            self.pipeline.train(inputs, loss, run.enter_stream)

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        remaining = iter(rows)
        while pieces := list(islice(remaining, 2 * self.mesh.pipeline)):
            by_number: dict[int, Any] = {}
            enter_stream(seed, pieces[0])
            inputs = [forward.inputs(piece.batch) for piece in pieces]
            self.pipeline.forward(inputs, by_number.__setitem__)
            for number, output in sorted(by_number.items()):
                yield pieces[number], as_float32(output)


class SplitModel(ModelShard):
    """This rank's part of a model. Every rank creates it from the same whole model, which is taken
    apart. It has the interface of WholeModel (training/assembled.py).
    """

    holder = "replica"
    walks_alone = False

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        mesh: Mesh,
        world: World,
        *,
        schedule: str,
        forward: Forward,
    ) -> None:
        self.mesh = mesh
        self._world = world
        at = mesh.at(world.rank)
        self._at = at
        self.share = mesh.share(world.rank), mesh.replicas
        """(number, count): this rank's share of the data, and the number of shares. The ranks that
        hold the rest of the model work on the same share.
        """
        self._names = ModelNames(model)
        # before the cut into stages, which hides ties between them
        plan = plan_of(model, task.parts, mesh.tensor) if mesh.tensor > 1 else {}
        devices, self._axes = open_devices(mesh, world)
        self._holds: dict[str, Any] = {"layers": "all"}
        self.runs = model
        """The trained module, with torch's parameters (DTensors) under the whole model's names. The
        task's optimizer is built from it.
        """
        shared = {}
        if mesh.pipeline > 1:
            arguments = forward.inputs(_example(task, world))
            layers = layers_of(model, task.parts, len(arguments))
            ranges = cut(layers, mesh.pipeline, task.parts)
            stages = [stage_module(layers, part) for part in ranges]
            shared = self._names.shared(stages)
            self.runs = stages[at.pipeline]
            names = [layers.names[number] for number in ranges[at.pipeline]]
            self._holds = {"stages": {str(at.pipeline): names}}
        self.runs.to(world.device)
        split_tensors(self.runs, plan, devices["tensor"])
        shard_parameters(self.runs, devices["shard"])
        self._locals = Locals(self.runs, mesh, world.rank)
        self.module = self._locals.module
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise UsageError(
                "nothing-to-train-on-rank", mesh=str(mesh), rank=world.rank, place=str(at)
            )
        self._tied = TiedStages(shared, self._names, self.module, self._axes.pipeline)
        self.norm = SplitNorm(self._axes.model, self._counted)
        # the last stage, of its tensor ranks the first
        self.reports = at.pipeline == mesh.pipeline - 1 and at.tensor == 0
        self._walk: InTurn | ThroughPipeline
        if mesh.pipeline > 1:
            pipeline = Pipeline(
                self.runs, self._axes.pipeline, world.device, schedule, autocast=forward.autocast
            )
            self._walk = ThroughPipeline(pipeline, mesh)
        else:
            self._walk = InTurn(
                self.runs, mesh, self.share[0], self._axes.shard, lambda: _example(task, world)
            )

    # -- the interface of the Stepper (ModelShard) ------------------------------------------------

    def replicas(self, everyone: Group) -> Group:
        return self._axes.data

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        # every rank of the tensor axis holds the tensors that it does not cut
        uncut = [(name, tensor) for name, tensor in named if not self._locals.cut_by_tensor(name)]
        return [(replicas, named), (self._axes.tensor, uncut)]

    def _counted(self, name: str) -> bool:
        return self._locals.counted(name) and self._tied.is_first(name)

    def collect(self, reducer: Reducer) -> None:
        self._locals.collect()
        self._tied.sum_gradients()
        for number, parameter in enumerate(reducer.parameters):
            if parameter.grad is not None and not reducer.ready[number]:
                reducer.gradient_ready(number, parameter)

    def optimizer_name(self, name: str) -> str:
        return self._names.first(name)

    def form(self, stepper: Stepper) -> SplitForm:
        writes = self._at.data == 0  # only the first replica writes
        return SplitForm(stepper, self._names, self._locals, self._tied, writes=writes)

    def sent(self) -> int:
        return sum(group.bytes_sent for group in self._axes.groups - {self._world.group})

    # -- the interface of the training loop -------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        self._locals.adopt(optimizer)

    def walk(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        self._walk.train(stepper, window, forward)

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        """Yield the output for each batch of this rank's share, on the rank that reports it. Every
        rank must iterate to the end.
        """
        for piece, output in self._walk.outputs(forward, rows, seed):
            if self.reports:
                yield piece, output
        self._locals.free()

    def digest(self) -> str:
        """Return the SHA-256 of the weights. Every rank calls it. No rank holds more than one whole
        tensor at a time.
        """
        return sha256(self._locals, self._axes.pipeline, self._names)

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self._world.rank,
            "node": self._world.node,
            **asdict(self._at),
            **self._holds,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "of": self._names.size,
        }


def _example(task: Task, world: World) -> Any:
    """Return a micro-batch of the training data, for shapes and timing. Random states stay as they
    are.
    """
    data: Any = task.train_data
    collate = task.collate or default_collate
    with randomness.preserved():
        samples = data
        if not is_iterable(data):
            samples = map(data.__getitem__, cycle(range(len(data))))
        batch = collate(list(islice(samples, task.micro_batch)))
    return to_device(batch, world.device)
