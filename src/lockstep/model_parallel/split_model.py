"""Build, cut and run this rank's part of a task's model on a mesh.

    build       the whole model, on the CPU, under the shared random stream: the weights are those
                of one process
    pipeline    keep this rank's stages, and free the rest (layers.py, split.py, stages.py)
    tensor      keep this rank's part of their matrices (tensor.py)
    shard       keep this rank's part of every parameter (sharded_parameters.py)

The result is a set of plain tensors of this rank (local.py). Stepper and optimizer use them as they
use a whole model. The ranks that hold one model compute their micro-batches together: one after the
other, or all at once through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep.checks.divergence import Named
from lockstep.collectives.group import Group
from lockstep.config.mesh import Mesh
from lockstep.config.pipeline_schedules import PipelineSchedule
from lockstep.config.task import Task
from lockstep.data.device import to_device
from lockstep.data.loader import is_iterable
from lockstep.data.rows import DatasetRows, Piece
from lockstep.errors import TaskError, UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.sharded_parameters import shard_parameters, take_part
from lockstep.model_parallel.split import ModelNames, TiedStages, by_time, cut, shared
from lockstep.model_parallel.split_form import SplitForm, open_devices, sha256
from lockstep.model_parallel.stages import joined_stages, stage_module
from lockstep.model_parallel.tensor import check_ties, split_tensors
from lockstep.runtime import randomness
from lockstep.step.forward import Forward, as_float32, enter_stream, outputs
from lockstep.step.stepper import Begin, Count, Stepper
from lockstep.updates.norm import SplitNorm
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


class InTurn:
    """Computes one micro-batch after the other. A rank of the shard axis with fewer micro-batches
    takes part in those of the others with zeros.
    """

    def __init__(
        self,
        modules: nn.Module,
        mesh: Mesh,
        share: int,
        shard: Group,
        example: Callable[[], Any],
        device: torch.device,
    ) -> None:
        """`share`: number of this rank's share of the data. `example()` returns a micro-batch."""
        self._modules, self._mesh, self._share, self._shard = modules, mesh, share, shard
        self._example, self._device = example, device
        self._spare: Any = None  # a micro-batch for `take_part`, if this rank has none left

    def train(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        # a collective: call it before the first forward, which waits for the other ranks
        lacking = self._lacking(len(window))
        for batch in stepper.micro_batches(window):
            with buffers_stay(self._modules, self._mesh):
                output = forward(batch)
            loss, weight = forward.loss(output, batch)
            stepper.backward(loss, weight)
            self._spare = batch
        for _ in range(lacking):
            take_part(self._modules, lambda: forward(self._spare_batch()))

    def _lacking(self, walked: int) -> int:
        """Return how many micro-batches fewer than the busiest rank of the shard axis this rank
        has. Collective.
        """
        if self._mesh.shard == 1:
            return 0
        most = torch.tensor(walked, device=self._device)
        self._shard.all_reduce(most, "max", place="for the number of micro-batches").wait()
        return int(most.item()) - walked

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        for piece, output in outputs(forward, rows, seed):
            self._spare = piece.batch
            yield piece, output
        # batches go to the shares in turn: the first shares may have one more
        if self._mesh.shard > 1 and 0 < rows.count % self._mesh.replicas <= self._share:
            forward(self._spare_batch())

    def _spare_batch(self) -> Any:
        if self._spare is None:
            self._spare = self._example()
        return self._spare

    def idle(self) -> str | None:
        return None


class ThroughPipeline:
    """Computes all micro-batches of a window at once, in the order of the pipeline's schedule."""

    def __init__(self, pipeline: Pipeline, modules: nn.Module, mesh: Mesh, rank: int) -> None:
        self._pipeline, self._modules, self._mesh, self._rank = pipeline, modules, mesh, rank
        # one entry a window: (busy seconds, seconds in total, micro-batches)
        self._times: list[tuple[float, float, int]] = []

    def train(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        stepper.at_once(
            window, lambda batches, begin, count: self._run(batches, begin, count, forward)
        )

    def _run(self, batches: Sequence[Any], begin: Begin, count: Count, forward: Forward) -> None:
        def loss(place: int, output: Any) -> Tensor:
            found, weight = forward.loss(as_float32(output), batches[place])
            return count(place, found, weight)

        if batches:
            with buffers_stay(self._modules, self._mesh):
                self._pipeline.train([forward.inputs(batch) for batch in batches], loss, begin)
            self._times.append((self._pipeline.busy, self._pipeline.wall, len(batches)))

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        walked = iter(rows)
        while pieces := list(islice(walked, 2 * self._mesh.pipeline)):
            found: dict[int, Any] = {}
            enter_stream(seed, pieces[0])
            self._pipeline.forward(
                [forward.inputs(piece.batch) for piece in pieces], found.__setitem__
            )
            for place, output in sorted(found.items()):
                yield pieces[place], as_float32(output)

    def idle(self) -> str | None:
        """Return a line with the measured idle time and that of the textbook formula. The first
        window is a warm-up and is not counted.
        """
        if len(self._times) < 2:
            return None
        busy, wall = (sum(each[place] for each in self._times[1:]) for place in (0, 1))
        micro_batches = max(each[2] for each in self._times)
        expected = self._pipeline.expected_idle(micro_batches)
        return (
            f"pipeline: rank {self._rank} idled {1 - busy / wall:.1%} of the time in which"
            f" {micro_batches} micro-batches went through {self._pipeline.count} stages;"
            f" {self._pipeline.schedule.formula} is {expected:.1%}"
        )


@dataclass(frozen=True, slots=True)
class _Stages:
    """The pipeline stages of a rank."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    """This rank's stages by number; empty if the model is not cut into stages."""
    count: int = 1
    """The number of stages on all ranks."""
    layers: dict[str, list[str]] = field(default_factory=dict)
    """The names of the layers of each stage, by the stage's number."""
    tied: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of the pipeline that hold a parameter, for parameters that several ranks hold."""


class SplitModel:
    """This rank's part of a model. Every rank creates it from the same whole model, which is taken
    apart. It has the interface of WholeModel (training/assembled.py).
    """

    holder = "replica"
    walks_alone = False
    activations = None

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        mesh: Mesh,
        world: World,
        *,
        schedule: str,
        split: str,
        forward: Forward,
    ) -> None:
        self.mesh, self._world = mesh, world
        self._at = mesh.at(world.rank)
        self._names = ModelNames(model)
        modules = [name for name, _ in model.named_modules()]
        _check_buffers(model, mesh)
        if mesh.tensor > 1:
            # ties between stages must be checked before the cut
            check_ties(model, task.parts.tensor, mesh.tensor)
        devices, self._axes = open_devices(mesh, world)
        self._stages = _Stages()
        if mesh.pipeline > 1:
            self._stages = _cut(
                task, model, mesh, world, PipelineSchedule.read(schedule), split, forward
            )
        runs = list(self._stages.modules.values()) or [model]
        for each in runs:
            each.to(world.device)
            if mesh.tensor > 1:
                split_tensors(
                    each,
                    task.parts.tensor,
                    devices["tensor"],
                    names=modules,
                    heads=task.parts.heads,
                )
            if mesh.shard > 1:
                shard_parameters(each, devices["shard"])
        self.runs = runs[0] if len(runs) == 1 else joined_stages(runs)
        """The trained module, with torch's parameters (DTensors) under the whole model's names. The
        task's optimizer is built from it.
        """
        self.modes = runs[0] if len(runs) == 1 else nn.ModuleList(runs)
        """The modules that are run, for train() and eval()."""
        self._locals = Locals(self.runs, self._at)
        self.module = self._locals.module
        self._tied = TiedStages(
            self._stages.tied, self._names, self.module, self._axes.pipeline, world.device
        )
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise UsageError(
                "nothing-to-train-on-rank", mesh=str(mesh), rank=world.rank, place=str(self._at)
            )
        self._walk = self._walk_with(task, schedule, forward)

    def _walk_with(self, task: Task, schedule: str, forward: Forward) -> InTurn | ThroughPipeline:
        stages, device = self._stages, self._world.device
        if not stages.modules:
            return InTurn(
                self.modes,
                self.mesh,
                self.share[0],
                self._axes.shard,
                lambda: _example(task, self._world),
                device,
            )
        pipeline = Pipeline(
            stages.modules,
            stages.count,
            self._axes.pipeline,
            device,
            schedule,
            autocast=forward.autocast,
        )
        return ThroughPipeline(pipeline, self.modes, self.mesh, self._world.rank)

    # -- the interface of the Stepper (ModelShard) ------------------------------------------------

    def replicas(self, everyone: Group) -> Group:
        return self._axes.data

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        # every rank of the tensor axis holds the tensors that it does not cut
        uncut = [(name, each) for name, each in named if not self._locals.cut_by_tensor(name)]
        return [(replicas, named), (self._axes.tensor, uncut)]

    @property
    def norm(self) -> SplitNorm:
        return SplitNorm(self._axes.model, self._counted)

    def _counted(self, name: str) -> bool:
        return self._locals.counted(name) and self._tied.is_first(name)

    @property
    def reports(self) -> bool:
        """True on the last stage, for the first of its tensor ranks."""
        last = not self._stages.modules or self._stages.count - 1 in self._stages.modules
        return last and self._at.tensor == 0

    def collect(self, reducer: Reducer) -> None:
        self._locals.collect()
        self._tied.sum_gradients()
        reducer.take_in()

    def optimizer_name(self, name: str) -> str:
        return self._names.first(name)

    def form(self, stepper: Stepper) -> SplitForm:
        writes = self._at.data == 0  # only the first replica writes
        return SplitForm(
            stepper, self._names, self._locals, self._tied, self._axes.tensor, writes=writes
        )

    def sent(self) -> int:
        axes = {
            self._axes.data,
            self._axes.shard,
            self._axes.pipeline,
            self._axes.tensor,
            self._axes.model,
        }
        return sum(group.bytes_sent for group in axes - {self._world.group})

    # -- the interface of the training loop -------------------------------------------------------

    @property
    def share(self) -> tuple[int, int]:
        """(number, count): this rank's share of the data, and the number of shares. The ranks that
        hold the rest of the model work on the same share.
        """
        return self.mesh.share(self._world.rank), self.mesh.replicas

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
        self._locals.let_go()

    def idle(self) -> str | None:
        return self._walk.idle()

    def digest(self) -> str:
        """Return the SHA-256 of the weights. Every rank calls it. No rank holds more than one whole
        tensor at a time.
        """
        return sha256(self._locals, self._axes, self._names.forms)

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self._world.rank,
            "node": self._world.node,
            "data": self._at.data,
            "shard": self._at.shard,
            "pipeline": self._at.pipeline,
            "tensor": self._at.tensor,
            **({"stages": self._stages.layers} if self._stages.modules else {"layers": "all"}),
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "of": self._names.size,
        }


def _cut(
    task: Task,
    model: nn.Module,
    mesh: Mesh,
    world: World,
    schedule: PipelineSchedule,
    split: str,
    forward: Forward,
) -> _Stages:
    """Cut the model into stages, and return this rank's."""
    example = forward.inputs(_example(task, world))
    layers = layers_of(model, task.parts, len(example))
    count = schedule.count(mesh.pipeline)
    measured = split == "time" and task.parts.stages is None and count <= len(layers)
    ranges = cut(
        layers, count, task.parts, by_time(layers, example, world.group) if measured else None
    )
    mine = schedule.stages_of(mesh.at(world.rank).pipeline, mesh.pipeline)
    users = {
        name: {stage % mesh.pipeline for stage in stages}
        for name, stages in sorted(shared(layers, ranges).items())
    }
    return _Stages(
        {number: stage_module(layers, ranges[number]) for number in mine},
        count,
        {str(number): [layers.names[place] for place in ranges[number]] for number in mine},
        {name: tuple(sorted(ranks)) for name, ranks in users.items() if len(ranks) > 1},
    )


def _example(task: Task, world: World) -> Any:
    """Return a micro-batch of the training data, for shapes and timing. Random states stay as they
    are.
    """
    data: Any = task.train_data
    with randomness.preserved():
        if not is_iterable(data):
            samples = [data[number % len(data)] for number in range(task.micro_batch)]
        else:
            samples = [
                sample for sample, _ in zip(iter(data), range(task.micro_batch), strict=False)
            ]
        return to_device((task.collate or default_collate)(samples), world.device)


def _check_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Raise a TaskError for running statistics, with a pipeline or shard axis. They are averaged by
    the weights of micro-batches, which only the last stage knows.
    """
    if mesh.pipeline == 1 and mesh.shard == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise TaskError(
                "buffer-changes-in-forward",
                mesh=str(mesh),
                buffer=f"{name} ({type(module).__name__})",
            )
