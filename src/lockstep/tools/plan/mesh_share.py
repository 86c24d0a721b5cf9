"""What of the work one rank of a mesh has: a part of the layers (pipeline), of every layer
(tensor), of every parameter (shard).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.collectives.network import Network
from lockstep.config.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.tools.plan.carriers import cost, part
from lockstep.tools.plan.work import RankWork


@dataclass(frozen=True, slots=True)
class MeshShare:
    """Of one rank. The gradients left are summed over `data` ranks, and where `shard` is above
    1, scattered over those before.
    """

    work: RankWork
    data: Network
    """Between the ranks that hold the same part."""
    shard: Network
    idle: float = 0.0
    """Seconds a step that a stage of a pipeline has nothing to do."""
    exposed: float = 0.0
    """Seconds a step that activations are under way, while nobody can compute."""
    sent: float = 0.0
    """Bytes of activations that a rank sends in a step."""


def share(work: RankWork, mesh: Mesh, network: Network) -> MeshShare:
    """Of a rank of the mesh; its micro-batches are those of its replica, which `work` says. Raises
    UsageError where the model's layers are not known.

    A pipeline runs as 1F1B or GPipe do: p - 1 of m + p - 1 turns are idle, and its gradients leave
    when all is over. A tensor axis sums activations twice in a layer's forward and twice in its
    backward (Shoeybi and others, Megatron-LM, 2019), and nothing is hidden behind these.
    """
    inner = mesh.pipeline * mesh.tensor
    # a rank updates what it keeps
    work = replace(work, optimizer=work.optimizer / (inner * mesh.shard))
    data, shard = part(network, mesh.data, mesh.shard * inner), part(network, mesh.shard, inner)
    if inner == 1:
        return MeshShare(work, data, shard)
    if not (work.layers and work.activation):
        raise UsageError(
            f"mesh={str(mesh)!r}: how many layers the model has and what goes between them is not"
            " known; use data and shard only"
        )
    if mesh.pipeline > work.layers:
        raise UsageError(
            f"mesh={str(mesh)!r} cuts {work.layers} layers into {mesh.pipeline} stages: give at"
            " most so many"
        )
    layers = work.layers / mesh.pipeline
    summed = cost(part(network, mesh.tensor, 1), "all_reduce", "ring", mesh.tensor)
    turns = work.micro_batches * 4 * layers
    hop = part(network, mesh.pipeline, mesh.tensor)
    far = mesh.pipeline * mesh.tensor > network.ranks_per_node
    link = hop.between if far else hop.within
    hops = 2 * (mesh.pipeline - 1)
    buckets = tuple(
        replace(
            each,
            elements=-(-each.elements // inner),
            tensors=(),
            ready=1.0 if mesh.pipeline > 1 else each.ready,
        )
        for each in work.buckets
    )
    mine = replace(
        work, forward=work.forward / inner, backward=work.backward / inner, buckets=buckets
    )
    return MeshShare(
        mine,
        data,
        shard,
        idle=(mesh.pipeline - 1) * (mine.forward + mine.backward),
        exposed=turns * summed.seconds(work.activation)
        + hops * (link.latency + work.activation / link.bandwidth),
        sent=turns * summed.sends * work.activation
        + (2 * work.micro_batches * work.activation if mesh.pipeline > 1 else 0.0),
    )
