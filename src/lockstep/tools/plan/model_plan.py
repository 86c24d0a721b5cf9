"""`lockstep plan --model`: step times of a model from the table, on devices from the table, for
every layout that fits.

Every device has the same samples in a step, however the model is laid out (weak scaling): a replica
that is spread over several devices computes as many micro-batches. Efficiency is the time in which
a device alone would compute its samples, without any recomputation, over the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.gradients.layout import BUCKET
from lockstep.tools.plan.model_memory import (
    RESERVED,
    Least,
    RankMemory,
    fits,
    layouts,
    least_devices,
    memory,
    name_of,
    too_large,
)
from lockstep.tools.plan.model_table import Device, Model
from lockstep.tools.plan.networks import DEVICE_SPREAD
from lockstep.tools.plan.simulate import HEAD, Assumed, PlanRow, simulate
from lockstep.tools.plan.work import WIDTH, RankWork, check_mesh, over
from lockstep.tools.timing.output_files import table
from lockstep.tools.timing.profile import Leaves

BACKWARD = 2.0  # forwards: one product for the gradient of the inputs, one for that of the weights


def work_of_model(
    model: Model,
    device: Device,
    *,
    batch: int,
    micro_batches: int = 1,
    sharded: bool = False,
    recompute: bool = False,
) -> RankWork:
    """`batch`: samples of a micro-batch. `sharded`: layers travel one by one, not in buckets.
    `recompute`: the backward runs the forward again.
    """
    forward = batch * model.flops / device.achieved[model.family]
    return RankWork(
        forward=forward,
        backward=(BACKWARD + recompute) * forward,
        micro_batches=micro_batches,
        spread=DEVICE_SPREAD,
        buckets=tuple(_leaves(model, least=1 if sharded else BUCKET // WIDTH)),
        width=_sharded_width(device) if sharded else WIDTH,
        samples=batch * micro_batches,
        layers=model.blocks,
        activation=batch * model.tokens * model.width * (2 if device.mixed else 4),
    )


def _sharded_width(device: Device) -> float:
    """Bytes of an element, on the mean of its three ways: under mixed precision parameters are
    gathered twice in 16 bits, gradients scattered in 32.
    """
    return (2 + 2 + 4) / 3 if device.mixed else WIDTH


def _leaves(model: Model, least: int) -> Iterator[Leaves]:
    """Layers in the order of the backward, as many together as have `least` elements; ready when
    the last of them is computed.
    """
    done, elements = 0.0, 0
    for place, layer in enumerate(reversed(model.layers), 1):
        done += layer.flops
        elements += layer.parameters
        if elements >= least or (elements and place == len(model.layers)):
            yield Leaves(ready=min(1.0, done / model.flops), elements=elements)
            elements = 0


# NCCL has a ring, and since 2.4 a double binary tree of nearly a ring's bandwidth and of
# logarithmic latency (Jeaugey, 2019), for which halving and doubling stands here: 2 log2 W
# messages, and a ring's bytes.
NCCL = Assumed(native=("ring", "halving_doubling"))


_OTHERS = 2  # layouts that are shown behind the quickest


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(PlanRow):
    """One layout at one number of devices. It fits."""

    method: Parallelism
    recompute: bool
    """Whether activations are recomputed in the backward: only where they do not fit otherwise."""
    memory: RankMemory

    @property
    def name(self) -> str:
        return name_of(self.method) + (", recomputing activations" if self.recompute else "")

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.name,
            "step_ms": 1e3 * self.predicted.step,
            "efficiency": self.efficiency,
            "memory_bytes": self.memory.total,
        }


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
        keys = ("step_ms", "efficiency", "limiting", "samples_per_s", "low_ms", "high_ms", "layout")
        return [
            {
                "workers": workers,
                **(
                    found[0].figures() | {"layout": found[0].name} if found else dict.fromkeys(keys)
                ),
                "layouts": [each.as_json() for each in found],
            }
            for workers, found in self.rows
        ]

    def describe(self) -> str:
        """What fits, then a row for each number of devices."""
        return "\n".join((*self._head(), "", *self._fits(), "", self._steps()))

    def _head(self) -> Iterator[str]:
        model, device, batch = self.model, self.device, self.batch
        unit, each = ("image", "an image") if model.tokens == 1 else ("sequence", "a token")
        samples = f"{batch} {unit}{'s' * (batch > 1)}" + (
            f" of {model.tokens} tokens" if model.tokens > 1 else ""
        )
        work = f"{model.flops / model.tokens / 1e9:.3g} GFLOP {each}"
        yield (
            f"{model.name}: {_count(model.parameters)} parameters, {work} forward; {samples} a"
            " device and step"
        )
        peak, precision = (
            (device.half, "mixed precision") if device.mixed else (device.fp32, "fp32")
        )
        achieved = device.achieved[model.family]
        rate = (
            f"{achieved / 1e12:.3g} of {peak / 1e12:.3g} TFLOP/s achieved by {model.family} models"
            f" in {precision}"
        )
        beyond = (
            " (counted as direct convolutions; Winograd's algorithm needs fewer)"
            if achieved > peak
            else ""
        )
        yield f"{device.name}: {_gigabytes(device.memory)} of memory, {rate}{beyond}"

    def _fits(self) -> Iterator[str]:
        head = [
            "layout",
            "devices",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "in all",
            "fits",
        ]
        found = least_devices(
            self.model, self.device, batch=self.batch, recompute=bool(self.model.blocks)
        )
        yield table(head, (_least(each, self.device) for each in found), left=(0, 7))
        note = "activations recomputed but for the inputs of blocks; " if self.model.blocks else ""
        yield f"({note}Adam in fp32: 16 bytes a parameter; {_gigabytes(RESERVED)} set aside)"

    def _steps(self) -> str:
        nothing = "no layout fits: see above for the least number of devices"
        rows: list[list[object]] = []
        for workers, found in self.rows:
            if not found:
                rows.append([workers, "-", *4 * [None], nothing])
            for place, each in enumerate(found[: 1 + _OTHERS]):
                cells = [*each.cells(), each.predicted.limiting]
                if place:
                    cells = [
                        cell if column in (1, 3) else None for column, cell in enumerate(cells)
                    ]
                rows.append([*cells, each.name])
        return table([*HEAD, "limiting", "layout"], rows, left=(5, 6))


def _least(found: Least, device: Device) -> list[object]:
    held, wrong = found.memory, too_large(found.memory, device)
    fit = f"no: {', '.join(wrong)}" if wrong else "yes"
    if found.devices is None and found.kind != "replicated":
        fit += ", on any number of devices"
    name = name_of(found.method) if found.devices and found.devices > 1 else found.kind
    sizes = (held.weights, held.gradients, held.optimizer, held.activations, held.total)
    return [name, found.devices or "-", *map(_gigabytes, sizes), fit]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setup:
    """What is trained, on which devices, with what between them."""

    model: Model
    device: Device
    network: Network
    batch: int
    assumed: Assumed

    def ranked(self, workers: int, method: Parallelism | None) -> tuple[Planned, ...]:
        """Of the layouts that fit, or of that one, the quickest first."""
        if method is None:
            methods = list(layouts(self.model, workers, self.network.ranks_per_node))
        elif method.mesh is None:
            methods = [method]
        else:  # with a data axis as long as the devices allow
            methods = [replace(method, mesh=over(method.mesh, workers))]
        found = [each for one in methods if (each := self.planned(workers, one))]
        return tuple(sorted(found, key=lambda each: each.predicted.step))

    def planned(self, workers: int, method: Parallelism) -> Planned | None:
        """None where it does not fit, not even with activations recomputed."""
        for recompute in (False, True) if self.model.blocks else (False,):
            held = memory(
                self.model, self.device, method, workers, batch=self.batch, recompute=recompute
            )
            if fits(held, self.device):
                return self._simulated(workers, method, held, recompute)
        return None

    def _simulated(
        self, workers: int, method: Parallelism, held: RankMemory, recompute: bool
    ) -> Planned:
        mesh = method.mesh or Mesh()
        spread_over = mesh.pipeline * mesh.tensor
        work = work_of_model(
            self.model,
            self.device,
            batch=self.batch,
            micro_batches=spread_over,
            sharded=mesh.shard > 1,
            recompute=recompute,
        )
        found = simulate(work, workers, self.network, method, self.assumed)
        alone = work_of_model(self.model, self.device, batch=self.batch)
        return Planned(
            workers=workers,
            method=method,
            recompute=recompute,
            memory=held,
            predicted=found,
            efficiency=alone.computation / found.step,
            samples=workers * self.batch,
        )


def plan_model(
    model: Model,
    device: Device,
    workers: Iterable[int],
    network: Network,
    *,
    batch: int | None = None,
    method: Parallelism | None = None,
    assumed: Assumed = NCCL,
) -> ModelPlan:
    """`batch`: samples of a device in a step; default: the model's usual. `method`: this layout
    only. Raises UsageError.
    """
    counts = sorted(set(workers))
    size = model.batch if batch is None else batch
    if method is not None and method.mesh is not None:
        check_mesh(method.mesh, model.name, model.blocks, counts)
    setup = _Setup(model=model, device=device, network=network, batch=size, assumed=assumed)
    rows = tuple((count, setup.ranked(count, method)) for count in counts)
    return ModelPlan(model=model, device=device, batch=size, rows=rows)


def _gigabytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"
