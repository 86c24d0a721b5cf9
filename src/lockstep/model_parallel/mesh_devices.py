"""The ranks of a mesh as torch and as this library know them: a DeviceMesh, and a Group along every
axis that has a use.

torch's process groups carry what torch sends by itself (DTensor, FSDP, from threads of autograd);
the Groups here carry what this library sends, and are others, so that the two never meet on one
process group in another order on each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.collectives.group import Group
from lockstep.config.mesh import AXES, Axis, Mesh
from lockstep.world.rendezvous import loopback
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Axes:
    """This rank's lines of the mesh. Lines of the same ranks are one Group, and the line of all
    ranks is the world's.
    """

    data: Group
    """Ranks that hold the same part of the model: gradients are summed along it."""
    shard: Group
    pipeline: Group
    tensor: Group
    model: Group
    """All ranks that hold one replica between them: shard x pipeline x tensor."""


def open_devices(mesh: Mesh, world: World) -> tuple[DeviceMesh, Axes]:
    """Both for the ranks of a world; every rank calls it, and the world closes them. Raises
    UsageError where the mesh has not its size.
    """
    mesh.check_size(world.size)
    with loopback(world.local_size == world.size):
        devices = device_mesh(mesh, world.device.type, world.timeout)
    return devices, axes_of(mesh, world)


def device_mesh(mesh: Mesh, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """The mesh in the form that torch takes, with the names of the axes. Every rank of torch's
    default process group calls it.

    No axis is given the default process group itself, which belongs to the world. `timeout` is for
    what torch sends along the axes.
    """
    backend = dist.get_backend()
    devices = init_device_mesh(
        device_type, mesh.shape, mesh_dim_names=AXES, backend_override=dict.fromkeys(AXES, backend)
    )
    if timeout is not None:
        for group in devices.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return devices


def axes_of(mesh: Mesh, world: World) -> Axes:
    """The Groups of this rank. Every rank calls it: each round makes one on every rank, so that
    torch names them alike everywhere.
    """
    made: dict[tuple[Axis, ...], Group] = {}

    def along(*axes: Axis) -> Group:
        long = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        if long not in made:
            line = mesh.line(world.rank, *long)
            made[long] = world.group if len(line) == world.size else world.subgroup(line)
        return made[long]

    return Axes(
        along("data"),
        along("shard"),
        along("pipeline"),
        along("tensor"),
        along("shard", "pipeline", "tensor"),
    )
