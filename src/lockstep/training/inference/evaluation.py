"""Evaluation counts every sample once, and gives the same bits for every number of ranks.

Batches are cut at fixed positions of the data set, whichever rank runs them
(data/evaluation_batches.py). A batch's sums travel with its number. Every rank then adds them up in
the order of the data set, in float64. An average of the ranks' averages would be wrong for every
ragged split. There is no collective inside the loop: the ranks synchronize once, at the end.

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

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.collectives.broadcast_json import bytes_of, everybodys
from lockstep.config.task import Task
from lockstep.data.evaluation_batches import DatasetRows, Piece
from lockstep.errors import TaskError, UsageError
from lockstep.step.forward import Forward, checked_sums, outputs
from lockstep.training.inference.model_call import Call, bare, device_of, evaluating
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.model_parallel.split_model import SplitModel


_NEEDED = ("update", "compute", "reset", "clone", "metric_state", "_reductions")
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


class MetricStates:
    """One metric's states, batch by batch. Call `update` after each of this rank's batches, and
    `compute` once, on all ranks.
    """

    def __init__(self, name: str, metric: Any, device: torch.device, world: World) -> None:
        is_metric = all(hasattr(metric, attribute) for attribute in _NEEDED)
        if not is_metric or not metric._reductions:
            raise UsageError("not-a-metric", name=name, type=type(metric).__name__)
        self._name = name
        self._world = world
        self._metric = metric.clone().to(device)
        # as `sync_on_compute=False` does: the states are reduced here
        self._metric._to_sync = False
        self._parts: dict[str, Tensor] = {}
        """On the CPU, by "state batch position-in-a-list". Of a folded state there is one, which
        has the rank in the place of the batch. Leading zeros let the keys sort.
        """

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
            owner = number if fold is None else self._world.rank
            tensors = state if isinstance(state, list) else [state]
            for position, tensor in enumerate(tensors):
                key = f"{name} {owner:012} {position:012}"
                part = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                if fold is not None and key in self._parts:
                    part = fold(self._parts[key], part)
                self._parts[key] = part

    def compute(self) -> dict[str, float]:
        """Return the metric over all batches as {name: value}; a metric of several values gives
        "name_key" for each. A collective.
        """
        packed = save(self._parts)
        gathered: dict[str, Tensor] = {}
        for rank in range(self._world.size):
            gathered |= load(bytes_of(rank, packed, self._world.control))
        self._metric.reset()
        for name, state in self._metric.metric_state.items():
            parts = [gathered[key] for key in sorted(gathered) if key.startswith(f"{name} ")]
            reduction = self._metric._reductions[name]
            reduced = _reduced(parts, reduction, isinstance(state, list))
            setattr(self._metric, name, _on(reduced, self._metric.device))
        self._metric._update_count = 1  # it was updated, batch by batch
        self._metric._computed = None
        return _numbers(self._name, self._metric.compute())


def _fold(
    reduction: Any, state: Tensor | list[Tensor]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    if not isinstance(state, Tensor):
        return None
    name = getattr(reduction, "__name__", "")
    if name == "dim_zero_sum" and (state.is_floating_point() or state.is_complex()):
        return None
    return _FOLDS.get(name)


def _reduced(parts: list[Tensor], reduction: Any, of_lists: bool) -> Any:
    """Reduce the parts as torchmetrics does with the states of its ranks: tensors are stacked,
    lists are concatenated.
    """
    if of_lists:
        return parts if reduction is None or not parts else reduction(parts)
    stacked = torch.stack(parts)
    if reduction is None:
        return stacked
    if not stacked.is_floating_point():
        return reduction(stacked)
    return reduction(stacked.double()).to(stacked.dtype)


def _on(state: Any, device: torch.device) -> Any:
    return [part.to(device) for part in state] if isinstance(state, list) else state.to(device)


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        numbers: dict[str, float] = {}
        for key, part in value.items():
            numbers |= _numbers(f"{name}_{key}", part)
        return numbers
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError("metric-not-a-number", name=name, shapes=[list(value.shape)])
    return {name: float(value)}


class Measurements:
    """What is measured of this rank's batches: (sum, weight) by name, and the states of metric
    objects.
    """

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, world: World) -> None:
        self._device = device
        self._world = world
        self._states = {
            name: MetricStates(name, metric, device, world) for name, metric in metrics.items()
        }
        self._pairs: dict[int, dict[str, Tensor]] = {}

    def add(self, piece: Piece, output: Any, values: Mapping[str, Any]) -> None:
        """Add a batch. `values`: (sum, weight) by name, and the arguments for metric objects; the
        others get the output and the batch's second part. Raises TaskError if a sum or a weight is
        more than one number.
        """
        for name, state in self._states.items():
            if name in values:
                state.update(piece.number, values[name])
            else:
                state.update(piece.number, _default_arguments(name, output, piece.batch))
        self._pairs[piece.number] = {
            name: self._pair(name, *pair)
            for name, pair in values.items()
            if name not in self._states
        }

    def totals(self) -> dict[str, float]:
        """Return the weighted means over all ranks' batches, equal on all ranks (0/0 is nan), and
        the values of the metric objects. A collective.
        """
        own = []
        for number, pairs in self._pairs.items():
            own.append((number, {name: pair.tolist() for name, pair in pairs.items()}))
        by_rank = everybodys(own, self._world.control, "for the sums of metrics")
        batches = dict(chain(*by_rank))
        names = sorted(batches[0])
        for pairs in batches.values():
            if sorted(pairs) != names:
                raise TaskError("metric-names-changed", names=sorted(pairs), first=names)
        totals = {}
        for name in names:
            in_order = [batches[number][name] for number in sorted(batches)]
            value, weight = map(sum, zip(*in_order, strict=True))
            totals[name] = value / weight if weight else float("nan")
        for state in self._states.values():
            totals |= state.compute()
        return totals

    def _pair(self, name: str, *pair: Tensor | float) -> Tensor:
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self._device) for part in pair]
        if any(part.numel() != 1 for part in parts):
            shapes = [list(part.shape) for part in parts]
            raise TaskError("metric-not-a-number", name=name, shapes=shapes)
        return torch.stack([part.reshape(()) for part in parts])


def _default_arguments(name: str, output: Any, batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        return output, batch[1]
    raise UsageError("metric-target-missing", name=name, type=type(batch).__name__)


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
    world = world or World.current()
    module = bare(model)
    device = device_of(module, world)
    objects = metrics or {}
    measurements = Measurements(objects, device, world)
    rows = DatasetRows(
        dataset,
        world,
        batch=batch,
        seed=seed,
        collate=collate,
        loader_workers=loader_workers,
        device=device,
    )
    try:
        with evaluating(module):
            for piece, output in outputs(Call(module, inputs), rows, seed):
                values: Mapping[str, Any] = {}
                if fn is not None:
                    values = checked_sums(fn(output, piece.batch), "fn", objects)
                measurements.add(piece, output, values)
    finally:
        rows.close()
    return measurements.totals()


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
        runner: OwnRows | SplitModel | None = None,
    ) -> None:
        """`runner`: runs the model. Default: every rank runs the whole model."""
        assert task.eval_data is not None
        self._forward = forward
        self._seed = task.seed
        self._world = world
        self._runner = runner or OwnRows(world)
        self.rows = DatasetRows(
            task.eval_data,
            world,
            batch=task.eval_micro_batch or task.micro_batch,
            seed=task.seed,
            collate=task.collate,
            loader_workers=loader_workers,
            share=self._runner.share,
        )
        self._metrics = {}
        self._arguments = {}
        for name, metric in (task.metric_objects or {}).items():
            if isinstance(metric, tuple) and len(metric) == 2:
                self._metrics[name], self._arguments[name] = metric
            else:
                self._metrics[name] = metric
        if "loss" in self._metrics:
            raise TaskError("metric-named-loss")
        self._new_measurements()  # fails now, and not after an epoch, if an object is no metric

    def _new_measurements(self) -> Measurements:
        return Measurements(self._metrics, self._world.device, self._world)

    def __call__(self) -> dict[str, float] | None:
        """Return the values, or None if a rank was asked to stop meanwhile (World.heed_signals):
        then no rank waits for the rest.
        """
        measurements = self._new_measurements()
        with evaluating(self._forward.model):
            for piece, output in self._runner.outputs(self._forward, self.rows, self._seed):
                if self._world.asked_to_stop and self._runner.walks_alone:
                    break
                values = dict(self._forward.metrics(output, piece.batch))
                for name, arguments in self._arguments.items():
                    values[name] = arguments(output, piece.batch)
                measurements.add(piece, output, values)
        if self._world.agree(self._world.asked_to_stop):
            return None
        return measurements.totals()
