"""Evaluation counts every sample once, and gives the same bits for every number of ranks.

The batches are cut at fixed positions of the data set, whoever runs them. A batch's sums travel with its number; every rank then
adds them up in the order of the data set, in float64. An average of the ranks' averages would be wrong for every ragged split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep import randomness
from lockstep.data.loader import Loader
from lockstep.errors import TaskError
from lockstep.task import Task
from lockstep.training.forward import Forward
from lockstep.world import World

_NO_STEP = -1  # the step whose random streams evaluation uses: no training step has it


class Evaluation:
    """`evaluation()` gives every metric of the task and "loss" over its eval_data: equal on all ranks. A collective.

    The model's modules are in eval mode meanwhile, without gradients; their modes and the random states are put back.
    """

    def __init__(self, task: Task, forward: Forward, world: World, *, loader_workers: int = 0) -> None:
        assert task.eval_data is not None
        self._forward, self._world, self._seed = forward, world, task.seed
        self._batch = task.eval_micro_batch or task.micro_batch
        self._count = -(-len(task.eval_data) // self._batch)  # type: ignore[arg-type]  # Task has checked that it has a length
        self._names: list[str] | None = None
        # As many micro-batches a window as there are ranks, in order: number n holds positions n * batch onwards, for any world size.
        self._loader = Loader(
            task.eval_data,
            global_batch=self._batch * world.size,
            micro_batch=self._batch,
            seed=task.seed,
            shuffle=False,
            num_workers=loader_workers,
            collate_fn=task.collate,
            device=world.device,
            rank=world.rank,
            size=world.size,
        )

    def __call__(self) -> dict[str, float]:
        with _evaluating(self._forward.model), randomness.preserved(), torch.no_grad():
            mine = dict(self._batches())
        if self._names is None:
            self._names = _from_first(sorted(mine[0]) if 0 in mine else [], self._world)
        table = torch.zeros(self._count, 2 * len(self._names), dtype=torch.float64)
        for number, sums in mine.items():
            table[number] = self._row(sums)
        self._world.control.all_reduce(table).wait()  # the others' rows are zeros, so nothing is rounded here
        totals = [sum(column) for column in table.T.tolist()]
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return {name: value / weight if weight else float("nan") for name, (value, weight) in zip(self._names, pairs, strict=True)}

    def _batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """This rank's batches: number in the data set, and each metric's [sum, weight]."""
        for epoch in self._loader.epochs(1):
            for window in epoch:
                for batch, positions in zip(window, window.positions, strict=True):
                    number = positions.start // self._batch
                    randomness.step(self._seed, _NO_STEP, number)
                    found = self._forward.metrics(self._forward(batch), batch)
                    yield number, {name: self._pair(name, *pair) for name, pair in found.items()}

    def _pair(self, name: str, value: Tensor | float, weight: Tensor | float) -> Tensor:
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self._world.device) for part in (value, weight)]
        if any(part.numel() != 1 for part in parts):
            raise TaskError(
                f"metric {name!r} is (sum, weight) of shapes {[list(part.shape) for part in parts]}: sum them to one number each"
            )
        return torch.stack([part.reshape(()) for part in parts])

    def _row(self, sums: dict[str, Tensor]) -> Tensor:
        assert self._names is not None
        if sorted(sums) != self._names:
            raise TaskError(
                f"metrics gave {', '.join(sorted(sums))} for one batch and {', '.join(self._names)} for the first: name the same each time"
            )
        return torch.cat([sums[name] for name in self._names]).cpu() + 0.0  # no -0: a sum with others' zeros would lose the sign


def _from_first(names: list[str], world: World) -> list[str]:
    """Rank 0's names, on all ranks: one that has no batch of its own cannot know them."""
    text = bytearray(json.dumps(names).encode())
    length = torch.tensor(len(text))
    world.control.broadcast(length).wait()
    letters = torch.frombuffer(text, dtype=torch.uint8) if world.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
    world.control.broadcast(letters).wait()
    found: list[str] = json.loads(bytes(letters.tolist()))
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each in its own again, also one that was kept in eval mode on purpose."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
