"""The grid of ranks, over every way to factor a world."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lockstep.config.mesh import AXES, Coordinates, Mesh
from tests.refused import refused


def factorisations(size: int) -> list[Mesh]:
    counts = [count for count in range(1, size + 1) if size % count == 0]
    meshes = (
        Mesh(data=d, shard=s, pipeline=p, tensor=t) for d, s, p, t in product(counts, repeat=4)
    )
    return [mesh for mesh in meshes if mesh.size == size]


EVERY = [mesh for size in (1, 2, 3, 4, 6, 8, 12, 16) for mesh in factorisations(size)]


def test_ranks_and_coordinates_are_one_to_one_and_lines_tile_the_world() -> None:
    for mesh in EVERY:
        everyone = list(range(mesh.size))
        assert [mesh.rank(mesh.at(rank)) for rank in everyone] == everyone, mesh
        for axis in AXES:
            lines = {mesh.line(rank, axis) for rank in everyone}
            assert sorted(rank for line in lines for rank in line) == everyone, (mesh, axis)
            along = list(range(getattr(mesh, axis)))
            for line in lines:
                assert [getattr(mesh.at(rank), axis) for rank in line] == along, (mesh, axis)


def test_ranks_of_one_share_hold_one_model_between_them() -> None:
    for mesh in EVERY:
        for rank in range(mesh.size):
            together = mesh.line(rank, "pipeline", "tensor")
            assert {mesh.share(other) for other in together} == {mesh.share(rank)}, mesh
            assert len(together) == mesh.pipeline * mesh.tensor
        assert {mesh.share(rank) for rank in range(mesh.size)} == set(range(mesh.replicas))


def test_the_tensor_axis_is_innermost() -> None:
    mesh = Mesh(data=2, pipeline=2, tensor=2)
    assert [mesh.at(rank) for rank in (0, 1, 2, 4)] == [
        Coordinates(0, 0, 0, 0),
        Coordinates(0, 0, 0, 1),
        Coordinates(0, 0, 1, 0),
        Coordinates(1, 0, 0, 0),
    ]
    assert mesh.line(5, "pipeline", "tensor") == (4, 5, 6, 7)


def test_read() -> None:
    for text, mesh in (
        ("data=2,pipeline=2", Mesh(data=2, pipeline=2)),
        (" tensor=2 , shard=3 ", Mesh(shard=3, tensor=2)),
        ("data=1", Mesh()),
    ):
        assert Mesh.read(text) == Mesh.read(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("data", "not-a-pair", {"where": "mesh='data'", "text": "data"}),
        ("", "not-a-pair", {"where": "mesh=''", "text": ""}),
        ("data=x", "wrong-value", {"name": "data", "value": "x"}),
        ("data=-1", "wrong-value", {"name": "data", "value": -1}),
        ("data=0", "wrong-value", {"name": "data", "value": 0}),
        ("pipe=2", "unknown-name", {"name": "pipe", "meant": "did you mean pipeline?"}),
        ("data=2,data=2", "given-twice", {"where": "mesh='data=2,data=2'", "name": "data"}),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        Mesh.read(text)


def test_another_number_of_ranks_is_refused_with_the_product() -> None:
    said = {"mesh": "data=2,tensor=2", "size": 4, "product": "data 2 x tensor 2", "workers": 3}
    with refused("mesh-of-other-size", **said):
        Mesh(data=2, tensor=2).check_size(3)
