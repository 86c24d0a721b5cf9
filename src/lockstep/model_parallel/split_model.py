"""This rank's part of a task's model, laid over a mesh: built, cut, and run.

    built whole, once, on the host     under the shared random stream, so that its weights are those
                                       of one process
    pipeline                           the stages of this rank stay, the rest is let go           (layers.py, split.py, stages.py)
    tensor                             this rank's part of their matrices                         (tensor.py)
    shard                              its part of every parameter                                (sharded_parameters.py)

What is left are plain tensors of this rank (local.py), with which Stepper and optimizer work as
they do with a whole model. A rank walks its micro-batches with those that hold the rest of the
model: one after the other, or all through a pipeline.
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
    """Buffers that a forward moves are averaged by the weights of whole models; here they would
    differ between ranks, or stand still.

    Raises TaskError for one that moves within the block. Of no interest where ranks with the same
    buffers see the same samples.
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
    """One micro-batch after the other. A rank of the shard axis that has fewer than another
    takes part in the other's, with zeros.
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
        """`share`: this rank's of the data; `example()`: a micro-batch."""
        self._modules, self._mesh, self._share, self._shard = modules, mesh, share, shard
        self._example, self._device = example, device
        self._spare: Any = None  # a micro-batch, to take part with where this rank has none

    def train(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        lacking = self._lacking(len(window))  # before the first: a forward waits for the others'
        for batch in stepper.micro_batches(window):
            with buffers_stay(self._modules, self._mesh):
                output = forward(batch)
            loss, weight = forward.loss(output, batch)
            stepper.backward(loss, weight)
            self._spare = batch
        for _ in range(lacking):
            take_part(self._modules, lambda: forward(self._spare_batch()))

    def _lacking(self, walked: int) -> int:
        """How many micro-batches less than another rank of the shard axis this one had."""
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
        # batches' numbers go round the shares: some have one more
        if self._mesh.shard > 1 and 0 < rows.count % self._mesh.replicas <= self._share:
            forward(self._spare_batch())

    def _spare_batch(self) -> Any:
        if self._spare is None:
            self._spare = self._example()
        return self._spare

    def idle(self) -> str | None:
        return None


class ThroughPipeline:
    """All of a window at once, as the pipeline's schedule has them."""

    def __init__(self, pipeline: Pipeline, modules: nn.Module, mesh: Mesh, rank: int) -> None:
        self._pipeline, self._modules, self._mesh, self._rank = pipeline, modules, mesh, rank
        # of every window: seconds busy, in all, and its micro-batches
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
        """Beside the textbook's formula. The first window, which warms up, is left out."""
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
    """What a rank has of a model that is cut into stages, or not."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    """By number; empty where it is not cut."""
    count: int = 1
    """On all ranks."""
    layers: dict[str, list[str]] = field(default_factory=dict)
    """Their names, by number."""
    tied: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters of several stages, and the ranks of the pipeline that have them."""


class SplitModel:
    """Made by every rank from the same whole model, which it takes apart. It answers what a
    WholeModel does (training/assembled.py).
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
            # of stages each alone would not be seen
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
        """What is trained, in torch's own form, under the whole model's names: for the task's
        optimizer.
        """
        self.modes = runs[0] if len(runs) == 1 else nn.ModuleList(runs)
        """All that is run: for train() and eval()."""
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

    # -- what the Stepper asks --------------------------------------------------------------------

    def replicas(self, everyone: Group) -> Group:
        return self._axes.data

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        # what is not cut is on every rank of the tensor axis
        uncut = [(name, each) for name, each in named if not self._locals.cut_by_tensor(name)]
        return [(replicas, named), (self._axes.tensor, uncut)]

    @property
    def norm(self) -> SplitNorm:
        return SplitNorm(self._axes.model, self._counted)

    def _counted(self, name: str) -> bool:
        return self._locals.counted(name) and self._tied.is_first(name)

    @property
    def reports(self) -> bool:
        """On the last stage, and there on one of its tensor ranks."""
        last = not self._stages.modules or self._stages.count - 1 in self._stages.modules
        return last and self._at.tensor == 0

    def collect(self, reducer: Reducer) -> None:
        self._locals.collect()
        self._tied.sum_gradients()
        reducer.take_in()

    def optimizer_name(self, name: str) -> str:
        return self._names.first(name)

    def form(self, stepper: Stepper) -> SplitForm:
        writes = self._at.data == 0  # of replicas the first does
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

    # -- what the training loop asks --------------------------------------------------------------

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many shares of the data this rank works on, together with those that hold
        the rest of the model.
        """
        return self.mesh.share(self._world.rank), self.mesh.replicas

    def adopt(self, optimizer: Optimizer) -> None:
        self._locals.adopt(optimizer)

    def walk(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        self._walk.train(stepper, window, forward)

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        """The output for each of this rank's batches, on the rank that reports it. Every rank
        walks it to its end.
        """
        for piece, output in self._walk.outputs(forward, rows, seed):
            if self.reports:
                yield piece, output
        self._locals.let_go()

    def idle(self) -> str | None:
        return self._walk.idle()

    def digest(self) -> str:
        """No rank ever has more than one tensor whole. Every rank calls it."""
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
    """This rank's stages."""
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
    """A micro-batch, to see its shape and to measure with; what is drawn for it is put back."""
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
    """Statistics that a forward moves are averaged over micro-batches by their weights, which
    only the last stage knows.
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
