"""Pictures of a mesh: which node and rank holds what, as text; the drawing says the same."""

from __future__ import annotations

import itertools
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.show import shares
from lockstep.config.mesh import Mesh
from lockstep.tools.drawing import Drawing
from lockstep.tools.show import mesh_picture as picture
from tests.config.test_mesh import EVERY
from tests.refused import refused


def shown(text: str) -> str:
    return dedent(text).strip("\n")


def text(mesh: Mesh, nodes: int = 1, layers: list[list[str]] | None = None) -> str:
    samples = shares(mesh.replicas, 32, None)
    return picture.text(picture.places(mesh, nodes, samples, layers), mesh, nodes)


def drawn(mesh: Mesh, nodes: int = 1) -> Drawing:
    samples = shares(mesh.replicas, 32, None)
    return picture.drawing(picture.places(mesh, nodes, samples), mesh, nodes)


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60))
def test_every_sample_is_in_one_share(replicas: int, batch: int, micro_batch: int) -> None:
    held = itertools.chain(*shares(replicas, batch, min(micro_batch, batch)))
    assert list(held) == list(range(batch))


def test_shares_with_more_with_fewer_and_with_nothing() -> None:
    assert shares(4, 9, 4) == [range(4), range(4, 8), range(8, 9), range(0)]
    with refused("wrong-value", name="batch", value=0):
        shares(2, 0, None)


def test_data_and_pipeline_on_two_nodes() -> None:
    layers = [["bytes"], ["blocks.0"], ["blocks.1", "norm"], ["a", "b", "c", "head"]]
    assert text(Mesh(data=2, pipeline=4), 2, layers) == shown("""
        mesh data=2,pipeline=4: 8 ranks on 2 nodes of 4, the micro-batches of a step in 2 shares

        node 0
          rank 0   share 0 of 2: samples 0-15    stage 0 of 4: bytes
          rank 1   share 0 of 2: samples 0-15    stage 1 of 4: blocks.0
          rank 2   share 0 of 2: samples 0-15    stage 2 of 4: blocks.1, norm
          rank 3   share 0 of 2: samples 0-15    stage 3 of 4: a to head

        node 1
          rank 4   share 1 of 2: samples 16-31   stage 0 of 4: bytes
          rank 5   share 1 of 2: samples 16-31   stage 1 of 4: blocks.0
          rank 6   share 1 of 2: samples 16-31   stage 2 of 4: blocks.1, norm
          rank 7   share 1 of 2: samples 16-31   stage 3 of 4: a to head

        data       0-4  1-5  2-6  3-7   the same layers, other samples: an all-reduce sums the gradients, between nodes
        pipeline   0-1-2-3  4-5-6-7     consecutive layers, the same samples: activations go on, gradients come back, inside nodes
    """)


def test_shard_and_tensor_across_nodes() -> None:
    lines = text(Mesh(shard=2, tensor=2), 4).splitlines()
    assert [line.partition("samples ")[2] for line in lines if line.startswith("  rank ")] == [
        "0-15    all layers   part 0 of 2 of matrices, shard 0 of 2",
        "0-15    all layers   part 1 of 2 of matrices, shard 0 of 2",
        "16-31   all layers   part 0 of 2 of matrices, shard 1 of 2",
        "16-31   all layers   part 1 of 2 of matrices, shard 1 of 2",
    ]
    assert [line.split()[:3] for line in lines[-2:]] == [
        ["shard", "0-2", "1-3"],
        ["tensor", "0-1", "2-3"],
    ]
    assert all(line.endswith(", between nodes") for line in lines[-2:])


def test_data_alone_pipeline_alone_and_one_rank() -> None:
    data = text(Mesh(data=3))
    assert "rank 1   share 1 of 3: samples 11-21   all layers\n" in data
    assert "data       0-1-2   the same layers, other samples: an all-reduce sums" in data
    assert "rank 1   share 0 of 1: samples 0-31   stage 1 of 2\n" in text(Mesh(pipeline=2))
    assert text(Mesh()).splitlines() == [
        "mesh data=1: 1 rank on 1 node, one model for all micro-batches",
        "",
        "node 0",
        "  rank 0   share 0 of 1: samples 0-31   all layers",
    ]


def test_nodes_must_divide_the_ranks_and_these_fit_a_drawing() -> None:
    for nodes in (0, 3, 5, 16):
        with refused("nodes-not-even", nodes=nodes, ranks=8, mesh="data=8"):
            text(Mesh(data=8), nodes)
    with refused("drawing-too-large", what="128 ranks", most=64):
        drawn(Mesh(data=128))


@pytest.mark.parametrize("mesh", EVERY, ids=str)
def test_the_drawing_has_every_rank_once_and_all_its_words(mesh: Mesh) -> None:
    for nodes in (count for count in (1, 2, 4) if mesh.size % count == 0):
        root = ElementTree.fromstring(drawn(mesh, nodes).svg())
        words = [str(element.text) for element in root if element.tag.endswith("text")]
        for kind, count in (("rank", mesh.size), ("node", nodes)):
            names = [word for word in words if word.startswith(f"{kind} ")]
            assert names == [f"{kind} {number}" for number in range(count)]
        assert len(arrows(root, "next")) == mesh.size // mesh.pipeline * (mesh.pipeline - 1)


def arrows(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in root if kind in element.get("class", "").split()]
