"""Evaluation counts every sample once, and gives the same bits for every number of ranks.

Batches are cut at fixed positions of the data set, whichever rank runs them (rows.py). A batch's
sums travel with its number. Every rank then adds them up in the order of the data set, in float64
(Tally). An average of the ranks' averages would be wrong for every ragged split. There is no
collective inside the loop: the ranks synchronize once, at the end.

For torchmetrics objects, each batch takes the part of a rank of torchmetrics, so the real number of
ranks has no effect.

A metric is reset and updated for each batch alone. All ranks get the batches' states and reduce
them in the order of the data set, with the reductions that the metric declares (`add_state`'s
`dist_reduce_fx`); floating-point sums in float64. Sums of whole numbers, maxima and minima do not
depend on an order. A rank reduces its own first, so it keeps one state and not one per batch. The
user's metric objects do not change. torchmetrics has no public way to read those reductions, so
this module reads the private `_reductions`. Its own way, `dist_sync_fn`, keeps every batch's states
until the end and sums floating-point numbers as float32. torchmetrics is never imported here: only
users who bring such a metric need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.collectives.broadcast_json import bytes_of, everybodys
from lockstep.config.task import Task
from lockstep.data.rows import DatasetRows, Piece
from lockstep.errors import TaskError, UsageError
from lockstep.step.forward import Call, Forward, bare, device_of, evaluating, outputs
from lockstep.training.resolve import wrong_type
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.split_model import SplitModel


_NEEDED = ("update", "compute", "reset", "clone", "metric_state", "_reductions")
State = Tensor | list[Tensor]
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


class States:
    """One metric's states, batch by batch. Call `update` after each of this rank's batches, and
    `compute` once, on all ranks.
    """

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        if any(not hasattr(metric, part) for part in _NEEDED):
            raise UsageError("not-a-metric", name=name, type=type(metric).__name__, problem="")
        if not metric._reductions:
            raise UsageError(
                "not-a-metric",
                name=name,
                type=type(metric).__name__,
                problem=", which keeps its state in other metrics",
            )
        self._name = name
        self._metric = metric.clone().to(device)
        # as `sync_on_compute=False` does: the states are reduced here
        self._metric._to_sync = False
        self._batches: dict[tuple[str, int], State] = {}  # (state, batch)
        self._folded: dict[str, Tensor] = {}

    def update(self, number: int, arguments: Any) -> None:
        """Add a batch. `arguments` are those of the metric's own `update`."""
        if not isinstance(arguments, (tuple, list)):
            raise UsageError(
                "metric-arguments-not-a-tuple", name=self._name, type=type(arguments).__name__
            )
        self._metric.reset()
        self._metric.update(*arguments)
        for name, state in self._metric.metric_state.items():
            fold = _fold(self._metric._reductions[name], state)
            kept = _on(state, torch.device("cpu"))
            if fold is None:
                self._batches[name, number] = kept
            elif name in self._folded:
                self._folded[name] = fold(self._folded[name], kept)
            else:
                self._folded[name] = kept.clone()

    def compute(self, world: World) -> dict[str, float]:
        """Return the metric over all batches as {name: value}; a metric of several values gives
        "name_key" for each. A collective.
        """
        self._metric.reset()
        device = self._metric.device
        for name, parts in self._gathered(world).items():
            reduced = _reduced(parts, self._metric._reductions[name])
            setattr(self._metric, name, _on(reduced, device))
        self._metric._update_count = 1  # it was updated, batch by batch
        self._metric._computed = None
        return _numbers(self._name, self._metric.compute())

    def _gathered(self, world: World) -> dict[str, list[State]]:
        """Return each state's parts in batch order; a folded state has one part per rank."""
        found: dict[str, dict[int, State]] = {name: {} for name in self._metric._reductions}
        mine = self._batches | {(name, world.rank): state for name, state in self._folded.items()}
        packed = _pack(mine)
        for rank in range(world.size):
            for (name, number), state in _unpack(bytes_of(rank, packed, world.control)).items():
                found[name][number] = state
        return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}


def _fold(reduction: Any, state: State) -> Callable[[Tensor, Tensor], Tensor] | None:
    name = getattr(reduction, "__name__", "")
    if not isinstance(state, Tensor) or (
        name == "dim_zero_sum" and (state.is_floating_point() or state.is_complex())
    ):
        return None
    return _FOLDS.get(name)


def _reduced(parts: list[State], reduction: Any) -> Any:
    """Reduce the parts as torchmetrics does with the states of its ranks: tensors are stacked,
    lists are concatenated.
    """
    if any(isinstance(part, list) for part in parts):
        flat = [each for part in parts for each in part]
        return flat if reduction is None or not flat else reduction(flat)
    stacked = torch.stack([part for part in parts if isinstance(part, Tensor)])
    if reduction is None:
        return stacked
    if not stacked.is_floating_point():
        return reduction(stacked)
    return reduction(stacked.double()).to(stacked.dtype)


def _on(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_on(part, device) for part in state]
    return state.detach().to(device)


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {
            inner: number
            for key, part in value.items()
            for inner, number in _numbers(f"{name}_{key}", part).items()
        }
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError("metric-not-a-number", name=name, shapes=[list(value.shape)])
    return {name: float(value)}


def _pack(states: Mapping[tuple[str, int], State]) -> bytes:
    """Return a line of JSON with (state, batch, length of a list or null for a tensor) for each
    state, and behind it all tensors in that order, as safetensors.
    """
    index = [
        (*key, None if isinstance(state, Tensor) else len(state)) for key, state in states.items()
    ]
    parts = [
        part
        for state in states.values()
        for part in ([state] if isinstance(state, Tensor) else state)
    ]
    tensors = {str(place): part.contiguous().clone() for place, part in enumerate(parts)}
    return json.dumps(index).encode() + b"\n" + save(tensors)


def _unpack(packed: bytes) -> dict[tuple[str, int], State]:
    index, _, rest = packed.partition(b"\n")
    tensors = load(rest)
    parts = (tensors[str(place)] for place in range(len(tensors)))
    return {
        (name, number): next(parts) if length is None else [next(parts) for _ in range(length)]
        for name, number, length in json.loads(index)
    }


class OwnRows:
    """Every rank runs the whole model on rows of its own."""

    walks_alone = True
    """Whether this rank may stop before the others."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def share(self) -> tuple[int, int]:
        """(number, count) of the share of the rows that this rank runs."""
        return self._world.rank, self._world.size

    def outputs(
        self, forward: Forward, rows: DatasetRows, seed: int
    ) -> Iterator[tuple[Piece, Any]]:
        """Yield the model's output for each batch that this rank reports. Every rank iterates to
        the end.
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
    """Return the weighted means of what `fn` measures over a map-style data set, each sample once.

    All ranks call it, and get the same values. The model runs in eval mode without gradients; modes
    and random states are restored. For a DistributedDataParallel, `sync_buffers()` is called first,
    and its `.module` runs. With equal intra-op threads on the ranks (`torch.set_num_threads`) the
    result has the same bits for every world size.

    Example::

        def correct(output, batch):
            return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}

        print(lockstep.evaluate(model, test_data, correct)["accuracy"])

    Args:
        model: a module, or a wrapper around one; equal on all ranks.
        dataset: a map-style data set.
        fn: (output, batch) -> {name: (sum, weight)}, as Task.metrics. The result is the sum of sums
            over the sum of weights, in float64; nan where the weights are 0.
        metrics: torchmetrics.Metric objects by name. `fn` may return the arguments of an object's
            `update` under its name; others are updated with `(output, batch[1])`. The objects
            themselves are neither updated nor reset.
        batch: samples per forward, at fixed positions. The result may depend on it; it does not
            depend on the number of ranks.
        collate: list of samples -> batch. Default: torch's.
        loader_workers: processes of each rank that load data.
        inputs: batch -> the model's arguments, a tuple or a dict of keywords. Default: the batch's
            first part.
        seed: seed of the random numbers that the data set and the model draw.
        world: the world to use. Default: the open one.

    Returns:
        The values by name.

    Raises:
        UsageError: no world is open, a data set that is empty or iterable, batch < 1, or neither fn
            nor metrics.
        TaskError: fn returned anything but (sum, weight) pairs of single numbers, or different
            names for different batches.
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
                            else _default_arguments(name, output, piece.batch)
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
    """`evaluation()` returns every metric of the task and "loss" over its eval_data, equal on all
    ranks. A collective.

    Meanwhile the model's modules are in eval mode, without gradients. Their modes and the random
    states are restored.
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
        """`placed`: runs the model. Default: every rank runs the whole model."""
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
        self._objects = {
            name: given
            if isinstance(given, tuple) and len(given) == 2
            else (given, partial(_default_arguments, name))
            for name, given in (task.metric_objects or {}).items()
        }
        if "loss" in self._objects:
            raise TaskError("metric-named-loss")
        self._states()  # fails now, and not after an epoch, if an object is no metric

    def _states(self) -> dict[str, States]:
        device = self._world.device
        return {name: States(name, metric, device) for name, (metric, _) in self._objects.items()}

    def __call__(self) -> dict[str, float] | None:
        """Return the values, or None if a rank was asked to stop meanwhile (World.heed_signals):
        then no rank waits for the rest.
        """
        mine, states = {}, self._states()
        with evaluating(self._forward.model):
            for piece, output in self._placed.outputs(self._forward, self.rows, self._seed):
                if self._world.asked_to_stop and self._placed.walks_alone:
                    break
                mine[piece.number] = self._tally.pairs(self._forward.metrics(output, piece.batch))
                for name, state in states.items():
                    _, arguments = self._objects[name]
                    state.update(piece.number, arguments(output, piece.batch))
        if self._world.agree(self._world.asked_to_stop):
            return None
        totals = self._tally.totals(mine)
        for state in states.values():
            totals |= state.compute(self._world)
        return totals


def checked(found: Any, what: str, free: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `found`, which the user's function has returned. Raises TaskError if it is not a dict
    of pairs; names in `free` may have other values.
    """
    if not isinstance(found, Mapping):
        raise wrong_type(what, found, "a dict of name -> (sum, weight)")
    for name, pair in found.items():
        if name not in free and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            expected = "(sum, weight), such as (correct.sum(), len(y))"
            raise wrong_type(f"{what}, for {name!r},", pair, expected)
    return found


def _default_arguments(name: str, output: Any, batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return output, batch[1]
    raise UsageError("metric-target-missing", name=name, type=type(batch).__name__)


class Tally:
    """`tally.totals(mine)` returns the weighted means over all `count` batches, equal on all ranks;
    0/0 is nan.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world, self._count = world, count
        self._names: list[str] | None = None

    def pairs(self, found: Mapping[str, tuple[Any, Any]]) -> dict[str, Tensor]:
        """Return one batch's (sum, weight) by name, each as a tensor of two float64 numbers. Raises
        TaskError if a sum or a weight is more than one number.
        """
        return {name: self._pair(name, *pair) for name, pair in found.items()}

    def totals(self, mine: Mapping[int, dict[str, Tensor]]) -> dict[str, float]:
        """Return the means over all batches. `mine`: this rank's, by number. A collective."""
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
