"""The ways to lay a training of a known model out over so many devices, as Methods of the same name that `lockstep train` takes."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.mesh.layout import Mesh
from lockstep.method import Method
from lockstep.plan.models.layers import Model


def layouts(model: Model, workers: int, per_node: int) -> Iterator[Method]:
    """Replicated, sharded update, sharded parameters over all or over a server; and, of a model with blocks, tensor inside a server and stages."""
    yield Method()
    if workers == 1:
        return
    yield Method(update="sharded")
    yield Method(mesh=Mesh(shard=workers))
    if 1 < per_node < workers and workers % per_node == 0:
        yield Method(mesh=Mesh(shard=per_node, data=workers // per_node))
    if not model.blocks:
        return
    for tensor in _powers(min(per_node, workers)):
        for stages in _powers(min(model.blocks, workers // tensor)):
            if tensor * stages > 1 and workers % (tensor * stages) == 0:
                yield Method(mesh=Mesh(tensor=tensor, pipeline=stages, data=workers // (tensor * stages)))


def name_of(method: Method) -> str:
    """As on the command line of `lockstep train`, without dashes."""
    told = []
    if method.mesh is not None and not method.mesh.only_data:
        told.append(f"mesh {method.mesh}")
    if method.update != "replicated":
        told.append(f"update {method.update}")
    if method.reduce not in ("auto", "native"):
        told.append(f"reduce {method.reduce}")
    if method.compression is not None:
        told.append(f"compress {method.compression}")
    if method.sync_every is not None:
        told.append(f"sync-every {method.sync_every}")
    return ", ".join(told) or "replicated"


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
