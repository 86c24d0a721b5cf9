"""This rank's part of a task's model, laid over a mesh: built, cut, and run.

    built whole, once, on the host     under the shared random stream, so that its weights are those of one process
    pipeline                           the stages of this rank stay, the rest is let go           (layers.py, split.py, stages.py)
    tensor                             this rank's part of their matrices                         (tensor.py)
    shard                              its part of every parameter                                (shard.py)

What is left are plain tensors of this rank (local.py), with which Stepper and optimizer work as they do with a whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.data import default_collate

from lockstep import randomness
from lockstep.checkpoints.identity import weights
from lockstep.collectives.group import Group
from lockstep.data.device import to_device
from lockstep.data.loader import is_iterable
from lockstep.errors import TaskError, UsageError
from lockstep.inference.rows import DatasetRows, Piece, enter_stream, outputs
from lockstep.mesh.layout import Mesh
from lockstep.mesh.schedules import Schedule
from lockstep.model_parallel.devices import Axes, open_devices
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.shard import shard_parameters, take_part
from lockstep.model_parallel.split import by_time, cut, shared, tied
from lockstep.model_parallel.stages import joined_stages, stage_module
from lockstep.model_parallel.tensor import check_ties, split_tensors
from lockstep.stepper import Begin, Count, Stepper
from lockstep.stepper_state import forms_of
from lockstep.task import Task
from lockstep.training.forward import Forward, as_float32
from lockstep.world import World


class Part:
    """Made by every rank from the same whole model, which it takes apart. It is what the Stepper calls `held` (held.py)."""

    def __init__(self, task: Task, model: nn.Module, mesh: Mesh, world: World, *, schedule: str, split: str, forward: Forward) -> None:
        self.mesh, self.world, self._task = mesh, world, task
        self._at = mesh.at(world.rank)
        self.forms = forms_of(weights(model).items())
        """Shape and dtype of all tensors of the whole model, under the names that checkpoints give them."""
        self.parameter_names = tuple(name for name, _ in model.named_parameters())
        """Of the whole model, each once, in its order."""
        self.whole_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._other_names = tied(model)
        modules = [name for name, _ in model.named_modules()]
        _check_buffers(model, mesh)
        if mesh.tensor > 1:
            check_ties(model, task.parts.tensor, mesh.tensor)  # of stages each alone would not be seen
        devices, self._axes = open_devices(mesh, world)
        self._shared: dict[str, tuple[int, ...]] = {}  # parameters of several stages, and the ranks of the pipeline that have them
        self.stages: dict[int, nn.Module] = {}
        self.count = 1
        self._schedule = Schedule.read(schedule)
        if mesh.pipeline > 1:
            self._cut(model, split, forward)
        runs = list(self.stages.values()) or [model]
        for each in runs:
            each.to(world.device)
            if mesh.tensor > 1:
                split_tensors(each, task.parts.tensor, devices["tensor"], names=modules, heads=task.parts.heads)
            if mesh.shard > 1:
                shard_parameters(each, devices["shard"])
        self.runs = runs[0] if len(runs) == 1 else joined_stages(runs)
        """What is trained, in torch's own form, under the whole model's names: for the task's optimizer."""
        self.modes = runs[0] if len(runs) == 1 else nn.ModuleList(runs)
        """All that is run: for train() and eval()."""
        self._locals = Locals(self.runs, self._at)
        self.module = self._locals.module
        named = self._named() if self._shared else {}
        self._tied = {name: named.get(name) if self._at.pipeline in ranks else None for name, ranks in self._shared.items()}
        self.pipeline: Pipeline | None = None
        if self.stages:
            self.pipeline = Pipeline(self.stages, self.count, self._axes.pipeline, world.device, schedule, autocast=forward.autocast)
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise UsageError(
                f"mesh={str(mesh)!r}: rank {world.rank} ({self._at}) has no parameter to train: have fewer parts, or freeze less"
            )
        self._idled: list[tuple[float, float, int]] = []  # of every window: seconds busy, in all, and its micro-batches
        self._spare: Any = None  # a micro-batch, to take part with where this rank has none

    def _cut(self, model: nn.Module, split: str, forward: Forward) -> None:
        """Keep this rank's stages."""
        example = forward.inputs(self._example())
        layers = layers_of(model, self._task.parts, len(example))
        self.count = self._schedule.count(self.mesh.pipeline)
        measured = split == "time" and self._task.parts.stages is None and self.count <= len(layers)
        costs = by_time(layers, example, self.world.group) if measured else None
        ranges = cut(layers, self.count, self._task.parts, costs)
        self.layer_names = [[layers.names[number] for number in part] for part in ranges]
        mine = self._schedule.stages_of(self._at.pipeline, self.mesh.pipeline)
        self.stages = {number: stage_module(layers, ranges[number]) for number in mine}
        for name, users in sorted(shared(layers, ranges).items()):
            ranks = tuple(sorted({stage % self.mesh.pipeline for stage in users}))
            if len(ranks) > 1:
                self._shared[name] = ranks

    def _example(self) -> Any:
        """A micro-batch, to see its shape and to measure with; what is drawn for it is put back."""
        data: Any = self._task.train_data
        with randomness.preserved():
            if not is_iterable(data):
                samples = [data[number % len(data)] for number in range(self._task.micro_batch)]
            else:
                samples = [sample for sample, _ in zip(iter(data), range(self._task.micro_batch), strict=False)]
            return to_device((self._task.collate or default_collate)(samples), self.world.device)

    # -- what the Stepper asks ---------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Group:
        return self._axes.data

    @property
    def replica(self) -> Group:
        return self._axes.model

    @property
    def axes(self) -> Axes:
        return self._axes

    @property
    def reports(self) -> bool:
        """On the last stage, and there on one of its tensor ranks."""
        return self.is_last and self._at.tensor == 0

    @property
    def is_last(self) -> bool:
        return not self.stages or self.count - 1 in self.stages

    def adopt(self, optimizer: Optimizer) -> None:
        """Have an optimizer that was made for `runs` update this rank's tensors."""
        self._locals.adopt(optimizer)

    def collect(self) -> None:
        self._locals.collect()
        for name, parameter in self._tied.items():
            self._add_up(name, parameter)

    def _add_up(self, name: str, parameter: nn.Parameter | None) -> None:
        """The gradient of a parameter that several stages use: a sum over all of them. Ranks that have none of it add zeros."""
        gradient = None if parameter is None else parameter.grad
        told = [0 if parameter is None else parameter.numel(), int(gradient is not None)]
        size = torch.tensor(told, dtype=torch.int64, device=self.world.device)
        self._axes.pipeline.all_reduce_small(size, "max", place=f"for the size of {name}").wait()
        count, somebody = (int(each) for each in size.tolist())
        if not somebody:  # a replica without micro-batches
            return
        dtype = self.forms[self.checkpoint_name(name)][1]
        total = torch.zeros(count, dtype=dtype, device=self.world.device) if gradient is None else gradient.reshape(-1).clone()
        self._axes.pipeline.all_reduce(total, place=f"for the gradient of {name}, which several stages use").wait()
        if gradient is not None:
            gradient.copy_(total.view_as(gradient))
        elif parameter is not None:
            parameter.grad = total.view_as(parameter)

    def _named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by every name that they have in the whole model."""
        found = dict(self.module.named_parameters(remove_duplicate=False))
        return found | {first: found[name] for name, first in self._other_names.items() if name in found and first not in found}

    @property
    def names(self) -> Sequence[str]:
        """Of all tensors of the whole model, as checkpoints name them."""
        return tuple(self.forms)

    def checkpoint_name(self, name: str) -> str:
        """The one under which checkpoints know a tensor that has several (`identity.weights`)."""
        first = self._other_names.get(name, name)
        return min([first, *(other for other, its in self._other_names.items() if its == first)])

    def optimizer_name(self, name: str) -> str:
        """The one under which its optimizer state is known: the first in the model."""
        return self._other_names.get(name, name)

    def counted(self, name: str) -> bool:
        return self._locals.counted(name) and self.first_of_pipeline(name)

    def sent(self) -> int:
        axes = {self._axes.data, self._axes.shard, self._axes.pipeline, self._axes.tensor, self._axes.model}
        return sum(group.bytes_sent for group in axes - {self.world.group})

    # -- training ----------------------------------------------------------------------------------------------------------------------

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many shares of the data this rank works on, together with those that hold the rest of the model."""
        return self.mesh.share(self.world.rank), self.mesh.replicas

    def walk(self, stepper: Stepper, window: Any, forward: Forward) -> None:
        """All of a window's micro-batches, forward and backward."""
        if self.pipeline is not None:
            stepper.at_once(window, lambda batches, begin, count: self._through(batches, begin, count, forward))
            return
        lacking = self._lacking(len(window))  # before the first: a forward waits for the others'
        for batch in stepper.micro_batches(window):
            before = self._buffers()
            output = forward(batch)
            self._check_unmoved(before)
            loss, weight = forward.loss(output, batch)
            stepper.backward(loss, weight)
            self._spare = batch
        for _ in range(lacking):
            take_part(self.runs, lambda: forward(self._spare_batch()))

    def _through(self, batches: Sequence[Any], begin: Begin, count: Count, forward: Forward) -> None:
        assert self.pipeline is not None

        def loss(place: int, output: Any) -> Tensor:
            found, weight = forward.loss(as_float32(output), batches[place])
            return count(place, found, weight)

        if batches:
            before = self._buffers()
            self.pipeline.train([forward.inputs(batch) for batch in batches], loss, begin)
            self._check_unmoved(before)
            self._idled.append((self.pipeline.busy, self.pipeline.wall, len(batches)))

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """What shows that a forward has changed one; of no interest where ranks with the same buffers see the same samples."""
        if self.mesh.pipeline == 1 and self.mesh.shard == 1:
            return {}
        return {name: (id(buffer), buffer._version) for name, buffer in self.modes.named_buffers()}

    def _check_unmoved(self, before: dict[str, tuple[int, int]]) -> None:
        """Buffers that a forward moves are averaged by the weights of whole models; here they would differ between ranks, or stand still."""
        moved = [name for name, state in self._buffers().items() if before.get(name) != state]
        if moved:
            raise TaskError(
                f"mesh={str(self.mesh)!r}: a forward changes the buffer {moved[0]!r}, whose mean over a step's micro-batches needs a whole model on "
                "every rank: keep it out of the forward, or split tensors or data only"
            )

    def idle(self) -> str | None:
        """How long this rank's stages waited, in words, beside the textbook's formula. The first window, which warms up, is left out."""
        if self.pipeline is None or len(self._idled) < 2:
            return None
        busy, wall = (sum(each[place] for each in self._idled[1:]) for place in (0, 1))
        micro_batches = max(each[2] for each in self._idled)
        expected = self.pipeline.expected_idle(micro_batches)
        formula = self.pipeline.schedule.formula
        return (
            f"pipeline: rank {self.world.rank} idled {1 - busy / wall:.1%} of the time in which {micro_batches} micro-batches went through "
            f"{self.count} stages; {formula} is {expected:.1%}"
        )

    def _lacking(self, walked: int) -> int:
        """How many micro-batches less than another rank of the shard axis this one had: it has to take part in theirs."""
        if self.mesh.shard == 1:
            return 0
        most = torch.tensor(walked, device=self.world.device)
        self._axes.shard.all_reduce_small(most, "max", place="for the number of micro-batches").wait()
        return int(most.item()) - walked

    def _lacking_rows(self, rows: DatasetRows) -> int:
        """The same for the batches of an evaluation, whose numbers go round the shares."""
        number, shares = self.share
        return int(0 < rows.count % shares <= number) if self.mesh.shard > 1 else 0

    def _spare_batch(self) -> Any:
        if self._spare is None:
            self._spare = self._example()
        return self._spare

    # -- evaluation --------------------------------------------------------------------------------------------------------------------

    def outputs(self, forward: Forward, rows: DatasetRows, seed: int) -> Iterator[tuple[Piece, Any]]:
        """The output for each of this rank's batches, on the rank that reports it. Every rank walks it to its end."""
        if self.pipeline is not None:
            yield from self._outputs_through(forward, rows, seed)
            return
        for piece, output in outputs(forward, rows, seed):
            self._spare = piece.batch
            if self.reports:
                yield piece, output
        for _ in range(self._lacking_rows(rows)):
            forward(self._spare_batch())
        self._locals.let_go()

    def _outputs_through(self, forward: Forward, rows: DatasetRows, seed: int) -> Iterator[tuple[Piece, Any]]:
        assert self.pipeline is not None
        waiting: list[Piece] = []
        for piece in rows:
            waiting.append(piece)
            if len(waiting) == 2 * self.mesh.pipeline:
                yield from self._chunk(forward, waiting, seed)
                waiting = []
        if waiting:
            yield from self._chunk(forward, waiting, seed)

    def _chunk(self, forward: Forward, pieces: Sequence[Piece], seed: int) -> Iterator[tuple[Piece, Any]]:
        assert self.pipeline is not None
        found: dict[int, Any] = {}
        enter_stream(seed, pieces[0])
        self.pipeline.forward([forward.inputs(piece.batch) for piece in pieces], found.__setitem__)
        for place, output in sorted(found.items()):
            if self.reports:
                yield pieces[place], as_float32(output)

    def form(self, stepper: Stepper) -> Any:
        from lockstep.model_parallel.kept import Split  # which needs this file

        return Split(stepper)

    # -- checkpoints -------------------------------------------------------------------------------------------------------------------

    @property
    def locals(self) -> Locals:
        return self._locals

    def writes(self, name: str) -> bool:
        """Whether this rank's part of a tensor goes into a checkpoint: the first replica's do, and there those of the first stage that has it."""
        return self._at.data == 0 and self.first_of_pipeline(name)

    def first_of_pipeline(self, name: str) -> bool:
        """Whether no earlier rank of the pipeline has the same parameter."""
        ranks = self._shared.get(self._other_names.get(name, name))
        return ranks is None or self._at.pipeline == ranks[0]

    def describe(self) -> dict[str, Any]:
        """For mesh.json: where this rank stands, and what it holds."""
        held = {"stages": {str(number): self.layer_names[number] for number in self.stages}} if self.stages else {"layers": "all"}
        return {
            "rank": self.world.rank,
            "node": self.world.node,
            "data": self._at.data,
            "shard": self._at.shard,
            "pipeline": self._at.pipeline,
            "tensor": self._at.tensor,
            **held,
            "parameters": sum(parameter.numel() for parameter in self.module.parameters()),
            "of": self.whole_parameters,
        }


def _check_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Statistics that a forward moves are averaged over micro-batches by their weights, which only the last stage knows."""
    if mesh.pipeline == 1 and mesh.shard == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise TaskError(
                f"mesh={str(mesh)!r}: {name} ({type(module).__name__}) keeps running statistics, whose mean over a step's micro-batches needs a "
                "whole model on every rank: use LayerNorm or GroupNorm, or split tensors or data only"
            )
