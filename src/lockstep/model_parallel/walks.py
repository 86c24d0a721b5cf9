"""How a rank walks micro-batches with those that hold the rest of its model: one after the
other, or all through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.config.mesh import Mesh
from lockstep.data.rows import DatasetRows, Piece
from lockstep.errors import TaskError
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.sharded_parameters import take_part
from lockstep.step.forward import Forward, as_float32, enter_stream, outputs
from lockstep.step.stepper import Begin, Count, Stepper


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
        self._shard.all_reduce_small(most, "max", place="for the number of micro-batches").wait()
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
