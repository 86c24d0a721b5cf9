"""Memory of one rank for every way to lay a training out, and the least number of devices that
holds it.

    of a parameter          4 bytes, 4 of its gradient, 8 of Adam's two moments: 16, in fp32 and
                            under autocast, which leaves all of these in fp32
                            (fp16 weights with fp32 master copies, as in the ZeRO paper, come to 2 +
                            2 + 12: 16 too)
    replicated              all of it
    update=sharded          the optimizer's part over the replicas (ZeRO-1)
    shard                   everything over the ranks of the axis, and the layer at work and the
                            next one whole (FSDP, ZeRO-3)
    tensor, pipeline        everything over the ranks of both; the first and last stage also hold
                            the embedding or the output layer
    activations             what a forward keeps; recomputed: the inputs of the blocks, and one
                            block. A tensor axis divides them; a pipeline does not:
                            its first stage keeps as many micro-batches as there are stages (1F1B)

Estimates: what kernels, the allocator and the communication library take besides is RESERVED, for
all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.model_table import Device, Model

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8  # bytes a parameter
# CUDA's context, workspaces, NCCL's buffers, fragments: to the order of magnitude
RESERVED = 4 * 2**30
_MOST = 2**20  # devices among which a least number is looked for
_TENSOR = (1, 2, 4, 8)  # inside a server
_POWERS = [2**power for power in range(21)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of the rank that holds most."""

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
    """`batch`: samples of a micro-batch. `recompute` is for models with blocks."""
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
    """What alone does not fit; where each does but not their sum, that. Empty where it fits."""
    room = device.memory - RESERVED
    alone = tuple(
        name
        for name in ("weights", "gradients", "optimizer", "activations")
        if getattr(found, name) > room
    )
    return alone or (() if fits(found, device) else ("all together",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """A kind of layout on as few devices as hold it; where no number does, on as many as helps."""

    kind: str
    devices: int | None
    """None: no number of devices is enough."""
    method: Parallelism
    memory: RankMemory


def least_devices(
    model: Model, device: Device, *, batch: int, recompute: bool
) -> tuple[Least, ...]:
    """Of one replica with its optimizer's state, for each kind of layout."""

    def least(kind: str, of: Callable[[int], Parallelism], most: int) -> Least:
        """More devices never need more memory each, so halving finds the least."""

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
    """Devices of the whole split, not stages alone."""
    assert stages.method.mesh is not None
    return replace(stages, devices=stages.devices and stages.method.mesh.size)


def _held(model: Model, mesh: Mesh) -> float:
    """Parameters of the rank that holds most, before they are sharded."""
    if mesh.pipeline == 1:
        return model.parameters / mesh.tensor
    first, last = model.layers[0].parameters, model.layers[-1].parameters
    blocks = (model.parameters - first - last) * -(-model.blocks // mesh.pipeline) / model.blocks
    return (blocks + max(first, last)) / mesh.tensor


def _gathered(model: Model, device: Device, mesh: Mesh) -> tuple[float, float]:
    """Bytes of the layers that a sharding rank has whole: the one at work and the next, and the
    gradient of one.
    """
    if mesh.shard == 1:
        return 0.0, 0.0
    largest = max(layer.parameters for layer in model.layers) / (mesh.tensor * mesh.pipeline)
    return 2 * _width(device) * largest, GRADIENT * largest


def _kept(model: Model, recompute: bool) -> float:
    """Elements for one sample."""
    if not recompute:
        return model.kept
    assert model.blocks, "a model without blocks is not recomputed"
    block, head = model.layers[1], model.layers[-1]
    return float(model.blocks * model.tokens * model.width) + max(block.kept, head.kept)


def _width(device: Device) -> int:
    """Bytes of an element in the forward."""
    return 2 if device.mixed else 4


def layouts(model: Model, workers: int, per_node: int) -> Iterator[Parallelism]:
    """Replicated, sharded update, sharded parameters over all or over a server; and, of a model
    with blocks, tensor inside a server and stages.
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
    """As on the command line of `lockstep train`, without dashes."""
    told = {
        "mesh": method.mesh and not method.mesh.only_data and method.mesh,
        "update": method.update != "replicated" and method.update,
        "reduce": method.reduce not in ("auto", "native") and method.reduce,
        "compress": method.compression,
        "sync-every": method.sync_every,
    }
    return ", ".join(f"{option} {value}" for option, value in told.items() if value) or "replicated"
