"""`lockstep plan --model`: predicts a rank's memory and the step time, for a model and a device
from the table and every layout that fits.

Every device has the same number of samples in a step, in every layout (weak scaling). A replica on
n devices computes n micro-batches. Efficiency is the time in which one device alone would compute
its samples, without recomputation, divided by the time of the step.

    a parameter             4 bytes, 4 for its gradient, 8 for Adam's two moments: 16, in fp32 and
                            under autocast, which leaves all of these in fp32
                            (fp16 weights with fp32 master copies, as in the ZeRO paper, need 2 + 2
                            + 12: 16 too)
    replicated              every rank holds all of it
    update=sharded          the replicas divide the optimizer's state (ZeRO-1)
    shard                   the ranks of the axis divide everything; the current layer and the next
                            one are whole (FSDP, ZeRO-3)
    tensor, pipeline        the ranks of both axes divide everything; the first and last stage also
                            hold the embedding or the output layer
    activations             what a forward keeps; with recomputation: the inputs of the blocks, and
                            one block. A tensor axis divides them; a pipeline does not:
                            its first stage keeps as many micro-batches as there are stages (1F1B)

Memory is an estimate. The constant RESERVED stands for kernels, the allocator and the communication
library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.gradients.layout import BUCKET
from lockstep.tools.plan.model_table import Device, Model
from lockstep.tools.plan.networks import DEVICE_SPREAD
from lockstep.tools.plan.simulate import HEAD, Assumed, PlanRow, simulate
from lockstep.tools.plan.work import WIDTH, RankWork, check_mesh, over
from lockstep.tools.timing.output_files import table
from lockstep.tools.timing.profile import Leaves

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8  # bytes per parameter
# CUDA's context, workspaces, NCCL's buffers, fragmentation: to the order of magnitude
RESERVED = 4 * 2**30
_MOST = 2**20  # largest number of devices that is tried
_TENSOR = (1, 2, 4, 8)  # sizes of the tensor axis, which stays inside a server
_POWERS = [2**power for power in range(21)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of memory of the rank that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(
    model: Model,
    device: Device,
    method: Parallelism,
    workers: int,
    *,
    batch: int,
    recompute: bool = False,
) -> RankMemory:
    """Estimate a rank's memory. `batch`: samples of a micro-batch. `recompute`: whether activations
    are recomputed; only for models with blocks.
    """
    mesh = method.mesh or Mesh(data=workers)
    held = _held(model, mesh)
    working = _gathered(model, device, mesh)
    return RankMemory(
        weights=WEIGHT * held / mesh.shard + working[0],
        gradients=GRADIENT * held / mesh.shard + working[1],
        optimizer=MOMENTS * held / mesh.shard / (mesh.data if method.update == "sharded" else 1),
        activations=batch * _kept(model, recompute) * _width(device) / mesh.tensor,
    )


def fits(found: RankMemory, device: Device) -> bool:
    return found.total + RESERVED <= device.memory


def too_large(found: RankMemory, device: Device) -> tuple[str, ...]:
    """Return the parts of memory that do not fit even alone; ("all together",) if only their sum
    does not fit; empty if it fits.
    """
    room = device.memory - RESERVED
    alone = tuple(
        name
        for name in ("weights", "gradients", "optimizer", "activations")
        if getattr(found, name) > room
    )
    return alone or (() if fits(found, device) else ("all together",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """A kind of layout on the fewest devices that can hold it; if no number can, on the most."""

    kind: str
    devices: int | None
    """None: no number of devices is enough."""
    method: Parallelism
    memory: RankMemory


def least_devices(
    model: Model, device: Device, *, batch: int, recompute: bool
) -> tuple[Least, ...]:
    """Return the fewest devices that hold one replica and its optimizer's state, for each kind of
    layout.
    """

    def least(kind: str, of: Callable[[int], Parallelism], most: int) -> Least:
        """Find the number by bisection: with more devices, each never needs more memory."""

        def needed(count: int) -> RankMemory:
            return memory(model, device, of(count), count, batch=batch, recompute=recompute)

        low, high = 0, most
        if not fits(needed(most), device):
            return Least(kind=kind, devices=None, method=of(most), memory=needed(most))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(needed(middle), device) else (middle, high)
        return Least(kind=kind, devices=high, method=of(high), memory=needed(high))

    found = [
        least("replicated", lambda count: Parallelism(mesh=Mesh(data=count)), 1),
        least(
            "update sharded",
            lambda count: Parallelism(update="sharded", mesh=Mesh(data=count)),
            _MOST,
        ),
        least("shard", lambda count: Parallelism(mesh=Mesh(shard=count)), _MOST),
    ]
    if model.blocks:
        splits = [
            least("tensor, pipeline", partial(_split, tensor), model.blocks) for tensor in _TENSOR
        ]
        found.append(
            min((_times(each) for each in splits), key=lambda each: each.devices or math.inf)
        )
    return tuple(found)


def _split(tensor: int, stages: int) -> Parallelism:
    return Parallelism(mesh=Mesh(tensor=tensor, pipeline=stages))


def _times(stages: Least) -> Least:
    """Return `stages` with the devices of the whole split in place of the number of stages."""
    assert stages.method.mesh is not None
    return replace(stages, devices=stages.devices and stages.method.mesh.size)


def _held(model: Model, mesh: Mesh) -> float:
    """Return the parameters of the rank that holds most, before they are sharded."""
    if mesh.pipeline == 1:
        return model.parameters / mesh.tensor
    first, last = model.layers[0].parameters, model.layers[-1].parameters
    blocks = (model.parameters - first - last) * -(-model.blocks // mesh.pipeline) / model.blocks
    return (blocks + max(first, last)) / mesh.tensor


def _gathered(model: Model, device: Device, mesh: Mesh) -> tuple[float, float]:
    """Return the bytes that a rank of a shard axis holds unsharded: the weights of two layers, the
    current and the next, and the gradients of one.
    """
    if mesh.shard == 1:
        return 0.0, 0.0
    largest = max(layer.parameters for layer in model.layers) / (mesh.tensor * mesh.pipeline)
    return 2 * _width(device) * largest, GRADIENT * largest


def _kept(model: Model, recompute: bool) -> float:
    """Return the elements kept for the backward of one sample."""
    if not recompute:
        return model.kept
    assert model.blocks, "a model without blocks is not recomputed"
    block, head = model.layers[1], model.layers[-1]
    return float(model.blocks * model.tokens * model.width) + max(block.kept, head.kept)


def _width(device: Device) -> int:
    """Return the bytes of an element in the forward."""
    return 2 if device.mixed else 4


def layouts(model: Model, workers: int, per_node: int) -> Iterator[Parallelism]:
    """Yield the layouts to try: replicated, sharded update, parameters sharded over all ranks or
    over a server. For a model with blocks, also tensor axes inside a server and pipelines.
    """
    yield Parallelism()
    if workers == 1:
        return
    yield Parallelism(update="sharded")
    yield Parallelism(mesh=Mesh(shard=workers))
    if 1 < per_node < workers and workers % per_node == 0:
        yield Parallelism(mesh=Mesh(shard=per_node, data=workers // per_node))
    if not model.blocks:
        return
    for tensor in _POWERS[: min(per_node, workers).bit_length()]:
        for stages in _POWERS[: min(model.blocks, workers // tensor).bit_length()]:
            if tensor * stages > 1 and workers % (tensor * stages) == 0:
                yield Parallelism(
                    mesh=Mesh(tensor=tensor, pipeline=stages, data=workers // (tensor * stages))
                )


def name_of(method: Parallelism) -> str:
    """Return the name of a layout: its options of `lockstep train`, without dashes."""
    told = {
        "mesh": method.mesh and not method.mesh.only_data and method.mesh,
        "update": method.update != "replicated" and method.update,
        "reduce": method.reduce not in ("auto", "native") and method.reduce,
        "compress": method.compression,
        "sync-every": method.sync_every,
    }
    return ", ".join(f"{option} {value}" for option, value in told.items() if value) or "replicated"


# in units of a forward: one product for the gradient of the inputs, one for that of the weights
BACKWARD = 2.0


def work_of_model(
    model: Model,
    device: Device,
    *,
    batch: int,
    micro_batches: int = 1,
    sharded: bool = False,
    recompute: bool = False,
) -> RankWork:
    """Return the work of a rank. `batch`: samples of a micro-batch. `sharded`: whether layers are
    sent one by one, not in buckets. `recompute`: whether the backward runs the forward again.
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
    """Return the mean bytes of an element in its three messages. Under mixed precision, parameters
    are gathered twice in 16 bits, and gradients scattered in 32 bits.
    """
    return (2 + 2 + 4) / 3 if device.mixed else WIDTH


def _leaves(model: Model, least: int) -> Iterator[Leaves]:
    """Yield layers in the order of the backward, grouped until a group has `least` elements. A
    group is ready when its last layer has been computed.
    """
    done, elements = 0.0, 0
    for place, layer in enumerate(reversed(model.layers), 1):
        done += layer.flops
        elements += layer.parameters
        if elements >= least or (elements and place == len(model.layers)):
            yield Leaves(ready=min(1.0, done / model.flops), elements=elements)
            elements = 0


# NCCL has a ring, and since 2.4 a double binary tree with nearly a ring's bandwidth and logarithmic
# latency (Jeaugey, 2019). Halving and doubling models this tree here: 2 log2 W messages, and a
# ring's bytes.
NCCL = Assumed(native=("ring", "halving_doubling"))


_OTHERS = 2  # number of layouts shown after the fastest


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(PlanRow):
    """A layout that fits, on one number of devices."""

    method: Parallelism
    recompute: bool
    """Whether activations are recomputed in the backward: only if they do not fit otherwise."""
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
    """The layouts that fit, for each number of devices, the fastest first."""

    model: Model
    device: Device
    batch: int
    """Samples per device and step."""
    rows: tuple[tuple[int, tuple[Planned, ...]], ...]

    def as_json(self) -> list[dict[str, Any]]:
        """Return a list in order of workers. If nothing fits, `layouts` is empty, and all values
        but `workers` are None.
        """
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
        """Return the text: which layouts fit, then a row for each number of devices."""
        return "\n".join((*self._head(), "", *self._fits(), "", self._steps()))

    def _head(self) -> Iterator[str]:
        model, device, batch = self.model, self.device, self.batch
        unit, each = ("image", "an image") if model.tokens == 1 else ("sequence", "a token")
        samples = f"{batch} {unit}{'s' * (batch > 1)}" + (
            f" of {model.tokens} tokens" if model.tokens > 1 else ""
        )
        work = f"{model.flops / model.tokens / 1e9:.3g} GFLOP {each}"
        yield (
            f"{model.name}: {_count(model.parameters)} parameters, {work} forward; {samples} per"
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
        head = "layout | devices | weights | gradients | optimizer | activations | in all | fits"
        found = least_devices(
            self.model, self.device, batch=self.batch, recompute=bool(self.model.blocks)
        )
        yield table(head, (_least(each, self.device) for each in found), left=(0, 7))
        note = "activations recomputed, except the inputs of blocks; " if self.model.blocks else ""
        yield f"({note}Adam in fp32: 16 bytes per parameter; {_gigabytes(RESERVED)} reserved)"

    def _steps(self) -> str:
        nothing = "no layout fits: the table shows the smallest number of devices"
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
    """The model, the devices and the network between them."""

    model: Model
    device: Device
    network: Network
    batch: int
    assumed: Assumed

    def ranked(self, workers: int, method: Parallelism | None) -> tuple[Planned, ...]:
        """Return the layouts that fit, or only `method` if it is given and fits; fastest first."""
        if method is None:
            methods = list(layouts(self.model, workers, self.network.ranks_per_node))
        elif method.mesh is None:
            methods = [method]
        else:  # the data axis is as long as the number of devices allows
            methods = [replace(method, mesh=over(method.mesh, workers))]
        found = [each for one in methods if (each := self.planned(workers, one))]
        return tuple(sorted(found, key=lambda each: each.predicted.step))

    def planned(self, workers: int, method: Parallelism) -> Planned | None:
        """Plan one layout; None if it does not fit even with recomputed activations."""
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
    """Plan a model. `batch`: samples per device and step; default: that of the model in the table.
    `method`: plan only this layout. Raises UsageError.
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
