"""torch's mesh and the library's groups are the lines of the layout, for every way to factor a
world.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import lockstep
from lockstep.config.mesh import AXES, Mesh
from lockstep.model_parallel.split_form import device_mesh, open_devices
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.config.test_mesh import factorisations
from tests.refused import refused


@pytest.mark.parametrize("rank", [0, 3, 6, 7])
def test_process_groups_are_the_lines_of_the_mesh(rank: int) -> None:
    for mesh in factorisations(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            devices = device_mesh(mesh, "cpu")
            assert devices.mesh_dim_names == AXES
            assert tuple(devices.shape) == mesh.shape
            for axis in AXES:
                group = devices.get_group(axis)
                assert tuple(dist.get_process_group_ranks(group)) == mesh.line(rank, axis), mesh
                assert group is not dist.group.WORLD
                assert devices.get_local_rank(axis) == getattr(mesh.at(rank), axis), mesh
        finally:
            dist.destroy_process_group()


def lines(world: World) -> None:
    for mesh in factorisations(4):
        devices, axes = open_devices(mesh, world)
        lines = {**{axis: (axis,) for axis in AXES}, "model": ("shard", "pipeline", "tensor")}
        for name, along in lines.items():
            group = getattr(axes, name)
            assert group.ranks == mesh.line(world.rank, *along), (mesh, name)
            total = torch.tensor([float(world.rank)])
            group.all_reduce(total).wait()
            assert total.item() == sum(group.ranks), (mesh, name)
        for axis in AXES:
            group = devices.get_group(axis)
            assert tuple(dist.get_process_group_ranks(group)) == mesh.line(world.rank, axis)
            number = torch.ones(1)
            dist.all_reduce(number, group=group)
            assert number.item() == getattr(mesh, axis)


def test_groups_are_the_lines_of_the_mesh() -> None:
    run_ranks(lines, 4)


def test_a_mesh_of_another_size_is_refused() -> None:
    with lockstep.init() as world, refused("mesh-of-other-size", size=4, workers=1):
        open_devices(Mesh(data=2, tensor=2), world)
