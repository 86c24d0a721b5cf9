"""Evaluation counts every sample once, and gives the same bits for every number of ranks.

The batches are cut at fixed positions of the data set, whoever runs them (rows.py). A batch's sums
travel with its number; every rank then adds them up in the order of the data set, in float64
(Tally). An average of the ranks' averages would be wrong for every ragged split. There is no
collective inside the loop: a rank meets the others once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.collectives.broadcast_json import everybodys
from lockstep.config.task import Task
from lockstep.data.rows import DatasetRows, Piece
from lockstep.errors import TaskError, UsageError
from lockstep.step.forward import Call, Forward, bare, device_of, evaluating, outputs
from lockstep.training.inference.states import States
from lockstep.training.resolve import wrong_type
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.split_model import SplitModel


class OwnRows:
    """Every rank runs the whole model on rows of its own."""

    walks_alone = True
    """Whether this rank may end its walk before the others."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def share(self) -> tuple[int, int]:
        """Which of how many shares of the rows this rank walks."""
        return self._world.rank, self._world.size

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        """The model's output for each batch that this rank reports. Every rank walks it to its
        end.
        """
        return outputs(forward, rows, seed)


Measure = Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]


def evaluate(
    model: nn.Module,
    dataset: Dataset[Any],
    fn: Measure | None = None,
    *,
    metrics: Mapping[str, Any] | None = None,
    batch: int = 64,
    collate: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    inputs: Callable[[Any], Any] | None = None,
    seed: int = 0,
    world: World | None = None,
) -> dict[str, float]:
    """The weighted means of what `fn` measures, over a map-style data set, each sample once: equal
    on all ranks. All ranks call it.

    The model runs as it is, in eval mode and without gradients; modes and random states are put
    back. A DistributedDataParallel's `sync_buffers()` is called first and its `.module` run. With
    equal intra-op threads on the ranks (`torch.set_num_threads`) the result has the same bits for
    every world size.

    Args:
        model: a module, or a wrapper around one; equal on all ranks.
        dataset: map-style.
        fn: (output, batch) -> {name: (sum, weight)}, as Task.metrics: the result is Σ sum / Σ
            weight in float64, nan where Σ weight is 0.
        metrics: torchmetrics.Metric objects by name. `fn` may give the arguments of one's `update`
            under its name; one that it does not name is updated with `(output, batch[1])`. They are
            left as they are: neither updated nor reset.
        batch: samples of a forward, at fixed positions; it belongs to the result, the number of
            ranks does not.
        collate: list of samples -> batch; default: torch's.
        loader_workers: processes of each rank that load data.
        inputs: batch -> the model's arguments, a tuple or a dict of keywords; default: the batch's
            first part.
        seed: keys what the data set draws, and the model.
        world: default: the open one.

    Raises:
        UsageError: no world is open, an empty or iterable-style data set, batch < 1, neither fn nor
            metrics.
        TaskError: fn returned something else than (sum, weight) pairs of single numbers, or other
            names for another batch.
    """
    if fn is None and not metrics:
        raise UsageError("nothing-to-measure")
    found = World.current() if world is None else world
    module = bare(model)
    device = device_of(module, found)
    states = {name: States(name, metric, device) for name, metric in (metrics or {}).items()}
    rows = DatasetRows(
        dataset,
        found,
        batch=batch,
        seed=seed,
        collate=collate,
        loader_workers=loader_workers,
        device=device,
    )
    tally = Tally(found, rows.count)
    mine = {}
    try:
        with evaluating(module):
            for piece, output in outputs(Call(module, inputs), rows, seed):
                measured = checked(fn(output, piece.batch), "fn", states) if fn is not None else {}
                for name, state in states.items():
                    state.update(
                        piece.number,
                        (
                            measured[name]
                            if name in measured
                            else (output, _target(name, piece.batch))
                        ),
                    )
                mine[piece.number] = tally.pairs(
                    {name: pair for name, pair in measured.items() if name not in states}
                )
    finally:
        rows.close()
    totals = tally.totals(mine)
    for state in states.values():
        totals |= state.compute(found)
    return totals


class Evaluation:
    """`evaluation()` gives every metric of the task and "loss" over its eval_data: equal on all
    ranks. A collective.

    The model's modules are in eval mode meanwhile, without gradients; their modes and the random
    states are put back.
    """

    def __init__(
        self,
        task: Task,
        forward: Forward,
        world: World,
        *,
        loader_workers: int = 0,
        placed: OwnRows | SplitModel | None = None,
    ) -> None:
        """`placed`: what runs the model; default: every rank runs it whole."""
        assert task.eval_data is not None
        self._forward = forward
        self._seed = task.seed
        self._world = world
        self._placed = placed or OwnRows(world)
        self.rows = DatasetRows(
            task.eval_data,
            world,
            batch=task.eval_micro_batch or task.micro_batch,
            seed=task.seed,
            collate=task.collate,
            loader_workers=loader_workers,
            share=self._placed.share,
        )
        self._tally = Tally(world, self.rows.count)

    def __call__(self) -> dict[str, float] | None:
        """None where a rank was asked to stop meanwhile (World.heed_signals): then nobody waits
        for its end.
        """
        mine = {}
        with evaluating(self._forward.model):
            for piece, output in self._placed.outputs(self._forward, self.rows, self._seed):
                if self._world.asked_to_stop and self._placed.walks_alone:
                    break
                mine[piece.number] = self._tally.pairs(self._forward.metrics(output, piece.batch))
        if self._world.agree(self._world.asked_to_stop):
            return None
        return self._tally.totals(mine)


def checked(found: Any, what: str, free: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the user's function returned, if it is a dict of pairs, but for the names in `free`.
    Raises TaskError.
    """
    if not isinstance(found, Mapping):
        raise wrong_type(what, found, "a dict of name -> (sum, weight)")
    for name, pair in found.items():
        if name not in free and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            expected = "(sum, weight), such as (correct.sum(), len(y))"
            raise wrong_type(f"{what}, for {name!r},", pair, expected)
    return found


def _target(name: str, batch: Any) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return batch[1]
    raise UsageError("metric-target-missing", name=name, type=type(batch).__name__)


class Tally:
    """`tally.totals(mine)` are the weighted means over all `count` batches, equal on all ranks;
    0/0 is nan.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world, self._count = world, count
        self._names: list[str] | None = None

    def pairs(self, found: Mapping[str, tuple[Any, Any]]) -> dict[str, Tensor]:
        """One batch's (sum, weight) by name, each as a tensor of two float64 numbers. Raises
        TaskError for more than one number.
        """
        return {name: self._pair(name, *pair) for name, pair in found.items()}

    def totals(self, mine: Mapping[int, dict[str, Tensor]]) -> dict[str, float]:
        """From this rank's batches, by number, to the totals of all. A collective."""
        if self._names is None:
            said = everybodys(
                sorted(mine[0]) if 0 in mine else None,
                self._world.control,
                "for the names of metrics",
            )
            self._names = next((names for names in said if names is not None), [])
        names = self._names
        table = torch.zeros(self._count, 2 * len(names), dtype=torch.float64)
        for number, sums in mine.items():
            table[number] = _row(sums, names)
        # the others' rows are zeros, so nothing is rounded here
        self._world.control.all_reduce(table).wait()
        totals = [sum(column) for column in table.T.tolist()]
        pairs = zip(totals[::2], totals[1::2], strict=True)
        return {
            name: value / weight if weight else float("nan")
            for name, (value, weight) in zip(names, pairs, strict=True)
        }

    def _pair(self, name: str, value: Tensor | float, weight: Tensor | float) -> Tensor:
        parts = [
            torch.as_tensor(part, dtype=torch.float64, device=self._world.device)
            for part in (value, weight)
        ]
        if any(part.numel() != 1 for part in parts):
            raise TaskError(
                "metric-not-a-number", name=name, shapes=[list(part.shape) for part in parts]
            )
        return torch.stack([part.reshape(()) for part in parts])


def _row(sums: dict[str, Tensor], names: list[str]) -> Tensor:
    if sorted(sums) != names:
        raise TaskError("metric-names-changed", names=sorted(sums), first=names)
    # no -0: a sum with zeros would lose the sign
    return torch.cat([sums[name] for name in names]).cpu() + 0.0 if names else torch.empty(0)
