"""torchmetrics objects as metrics: every batch is what torchmetrics calls a rank, so the real
number of ranks cannot be seen.

A metric is reset and updated for each batch alone. The batches' states travel to all ranks and are
reduced in the order of the data set by the reductions that the metric declares (`add_state`'s
`dist_reduce_fx`), floating-point sums in float64. Whole numbers that are summed, and maxima and
minima, do not depend on an order: a rank reduces its own first, so that it keeps one of them and
not one a batch. The user's metric objects are left as they are. torchmetrics has no public way to
read those reductions: its own, `dist_sync_fn`, keeps every batch's states until the end, and sums
floating-point numbers as float32. So this reads the private `_reductions`. torchmetrics itself is
never imported here: nobody needs it who does not bring one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lockstep.collectives.broadcast_json import bytes_of
from lockstep.errors import UsageError
from lockstep.world.world import World

_NEEDED = ("update", "compute", "reset", "clone", "metric_state", "_reductions")
State = Tensor | list[Tensor]
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


class States:
    """One metric's states, batch by batch. `update` after each of this rank's batches, `compute`
    once, on all ranks.
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
        # what `sync_on_compute=False` sets: the states are reduced here
        self._metric._to_sync = False
        self._batches: dict[tuple[str, int], State] = {}  # (state, batch)
        self._folded: dict[str, Tensor] = {}

    def update(self, number: int, arguments: Any) -> None:
        """Take the batch's `arguments` into account: those of the metric's own `update`."""
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
        """The metric over all batches, as {name: value}; a metric of several values gives
        "name_value" each. A collective.
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
        """Every state's parts in the order of the batches; of folded ones one part a rank."""
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
    """As torchmetrics reduces the states of its ranks: stacked tensors, or the concatenated
    lists.
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
    """A line of JSON, (state, batch, length of a list or null for a tensor) each, and behind it
    all tensors in that order, as safetensors.
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
