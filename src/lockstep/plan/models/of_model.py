"""`lockstep plan --model`: step times of a model from the table, on devices from the table, for every layout that fits.

Every device has the same samples in a step, however the model is laid out (weak scaling): a replica that is spread over several devices
computes as many micro-batches. Efficiency is the time in which a device alone would compute its samples, without any recomputation, over the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.collectives.network import Network
from lockstep.errors import UsageError
from lockstep.mesh.layout import Mesh
from lockstep.method import Method
from lockstep.plan.models.devices import Device
from lockstep.plan.models.fits import Memory, fits, memory
from lockstep.plan.models.from_table import work_of_model
from lockstep.plan.models.layers import Model
from lockstep.plan.models.layouts import layouts, name_of
from lockstep.plan.simulation.simulate import Assumed, Predicted, simulate

# NCCL has a ring, and since 2.4 a double binary tree of nearly a ring's bandwidth and of logarithmic latency (Jeaugey, 2019), for which halving and
# doubling stands here: 2 log2 W messages, and a ring's bytes.
NCCL = Assumed(native=("ring", "halving_doubling"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One layout at one number of devices. It fits."""

    workers: int
    method: Method
    recompute: bool
    """Whether activations are recomputed in the backward: only where they do not fit otherwise."""
    memory: Memory
    predicted: Predicted
    efficiency: float
    samples_per_s: float

    @property
    def name(self) -> str:
        return name_of(self.method) + (", recomputing activations" if self.recompute else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """For each number of devices the layouts that fit, the quickest first."""

    model: Model
    device: Device
    batch: int
    """Samples of a device in a step."""
    rows: tuple[tuple[int, tuple[Planned, ...]], ...]

    def as_json(self) -> list[dict[str, Any]]:
        """In order of workers. Where nothing fits, all but `workers` is None."""
        return [_json(workers, found) for workers, found in self.rows]


def plan_model(
    model: Model,
    device: Device,
    workers: Iterable[int],
    network: Network,
    *,
    batch: int | None = None,
    method: Method | None = None,
    assumed: Assumed = NCCL,
) -> ModelPlan:
    """`batch`: samples of a device in a step; default: the model's usual. `method`: this layout only. Raises UsageError."""
    counts = sorted(set(workers))
    if not counts or counts[0] < 1:
        raise UsageError(f"--workers {','.join(map(str, counts)) or 'nothing'}: give one or more numbers of devices, each at least 1")
    size = model.batch if batch is None else batch
    if size < 1:
        raise UsageError(f"--batch {size}: give the samples of a device in a step, at least 1")
    if method is not None and method.mesh is not None:
        _check_mesh(model, method.mesh, counts)
    rows = tuple((count, _ranked(model, device, count, network, size, method, assumed)) for count in counts)
    return ModelPlan(model=model, device=device, batch=size, rows=rows)


def _ranked(
    model: Model, device: Device, workers: int, network: Network, batch: int, method: Method | None, assumed: Assumed
) -> tuple[Planned, ...]:
    methods = layouts(model, workers, network.ranks_per_node) if method is None else _stretched(method, workers)
    found = [each for one in methods if (each := planned(model, device, workers, network, batch=batch, method=one, assumed=assumed))]
    return tuple(sorted(found, key=lambda each: each.predicted.step))


def _stretched(method: Method, workers: int) -> list[Method]:
    """With a data axis as long as the devices allow."""
    if method.mesh is None:
        return [method]
    return [replace(method, mesh=replace(method.mesh, data=workers * method.mesh.data // method.mesh.size))]


def _check_mesh(model: Model, mesh: Mesh, counts: Sequence[int]) -> None:
    """Raises UsageError for axes that the model or the numbers of devices do not allow."""
    others = mesh.size // mesh.data
    for count in counts:
        if count % others:
            raise UsageError(
                f"--mesh {mesh} with --workers {count}: shard, pipeline and tensor take {others} devices; give a multiple of them"
            )
    if mesh.pipeline * mesh.tensor > 1 and not model.blocks:
        raise UsageError(f"--mesh {mesh} with --model {model.name}: it has no equal blocks to cut or to split; use data and shard")
    if mesh.pipeline > max(1, model.blocks):
        raise UsageError(f"--mesh {mesh} with --model {model.name}: it has {model.blocks} blocks, and so many stages at most")


def planned(
    model: Model, device: Device, workers: int, network: Network, *, batch: int, method: Method, assumed: Assumed = NCCL
) -> Planned | None:
    """None where it does not fit, not even with activations recomputed."""
    for recompute in (False, True) if model.blocks else (False,):
        held = memory(model, device, method, workers, batch=batch, recompute=recompute)
        if fits(held, device):
            return _planned(model, device, workers, network, batch, method, assumed, held, recompute)
    return None


def _planned(
    model: Model,
    device: Device,
    workers: int,
    network: Network,
    batch: int,
    method: Method,
    assumed: Assumed,
    held: Memory,
    recompute: bool,
) -> Planned:
    mesh = method.mesh
    spread_over = 1 if mesh is None else mesh.pipeline * mesh.tensor
    sharded = mesh is not None and mesh.shard > 1
    work = work_of_model(model, device, batch=batch, micro_batches=spread_over, sharded=sharded, recompute=recompute)
    found = simulate(work, workers, network, method, assumed)
    alone = work_of_model(model, device, batch=batch)
    return Planned(
        workers=workers,
        method=method,
        recompute=recompute,
        memory=held,
        predicted=found,
        efficiency=alone.computation / found.step,
        samples_per_s=workers * batch / found.step,
    )


def _json(workers: int, found: Sequence[Planned]) -> dict[str, Any]:
    best = found[0] if found else None
    return {
        "workers": workers,
        "step_ms": best and 1e3 * best.predicted.step,
        "efficiency": best and best.efficiency,
        "limiting": best and best.predicted.limiting,
        "samples_per_s": best and best.samples_per_s,
        "layout": best and best.name,
        "low_ms": best and 1e3 * best.predicted.low,
        "high_ms": best and 1e3 * best.predicted.high,
        "layouts": [
            {"layout": each.name, "step_ms": 1e3 * each.predicted.step, "efficiency": each.efficiency, "memory_bytes": each.memory.total}
            for each in found
        ],
    }
