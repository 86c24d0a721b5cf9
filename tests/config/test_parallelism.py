"""Which ways to train go together, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Compression, Outer, Parallelism
from lockstep.errors import UsageError
from tests.refused import refused


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("bf16", Compression("bf16")),
        ("int8", Compression("int8")),
        ("powersgd:4", Compression("powersgd", 4)),
    ],
)
def test_compressions(text: str, read: Compression) -> None:
    assert Compression.read(text) == read
    assert str(read) == text
    assert Parallelism(compress=text) == Parallelism(compress=text)
    assert (
        Parallelism(compress=read).recipe()
        == Parallelism(compress=text).recipe()
        == {"compress": text}
    )


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("average", Outer()),
        ("nesterov", Outer("nesterov")),
        ("nesterov:lr=0.5", Outer("nesterov", lr=0.5)),
        ("average:after=100", Outer(after=100)),
        ("nesterov:fragments=4,overlap=2", Outer("nesterov", fragments=4, overlap=2)),
    ],
)
def test_meetings(text: str, read: Outer) -> None:
    assert Outer.read(text) == read
    assert str(read) == text


def test_values_that_are_as_always_are_not_said() -> None:
    assert Parallelism(sync_every=8, outer="nesterov:lr=0.7,momentum=0.9").recipe() == {
        "sync_every": 8,
        "outer": "nesterov",
    }
    assert Parallelism(sync_every=8).recipe() == Parallelism(sync_every=8, outer="average").recipe()
    assert Parallelism().recipe() == Parallelism(update="sharded", reduce="central").recipe() == {}


def test_servers() -> None:
    assert Parallelism(update="server").bound == 4
    assert Parallelism(update="server", staleness="inf").bound == float("inf")
    assert Parallelism(update="server", staleness=0).alone


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ({"reduce": "gossip"}, "unknown-choice", {"name": "reduce", "value": "gossip"}),
        (
            {"update": "zero"},
            "unknown-choice",
            {"value": "zero", "choices": ["replicated", "sharded", "server"]},
        ),
        ({"update": "sharded:shards=2"}, "unknown-choice", {"value": "sharded:shards=2"}),
        (
            {"compress": "gzip"},
            "unknown-choice",
            {"choices": ["bf16", "fp16", "int8", "powersgd:RANK"]},
        ),
        ({"compress": "powersgd"}, "powersgd-without-rank", {"compress": "powersgd"}),
        ({"compress": "powersgd:1.5"}, "powersgd-without-rank", {"compress": "powersgd:1.5"}),
        ({"compress": "powersgd:0"}, "powersgd-without-rank", {}),
        ({"compress": "powersgd:inf"}, "powersgd-without-rank", {}),
        ({"compress": "bf16:3"}, "unknown-choice", {"value": "bf16:3"}),
        ({"sync_every": 0}, "wrong-value", {"name": "sync_every", "value": 0}),
        ({"outer": "nesterov"}, "outer-without-sync-every", {"outer": "nesterov"}),
        (
            {"sync_every": 4, "outer": "median"},
            "unknown-choice",
            {"name": "outer", "value": "median", "choices": ["average", "nesterov"]},
        ),
        ({"sync_every": 4, "outer": "average:lr=1"}, "average-with-lr", {}),
        ({"sync_every": 4, "outer": "nesterov:lr=0"}, "wrong-value", {"name": "lr", "value": 0}),
        (
            {"sync_every": 4, "outer": "nesterov:momentum=1"},
            "wrong-value",
            {"name": "momentum", "value": 1},
        ),
        (
            {"sync_every": 4, "outer": "nesterov:momenta=1"},
            "unknown-name",
            {"name": "momenta", "meant": "did you mean momentum?"},
        ),
        (
            {"sync_every": 4, "outer": "nesterov:fragments=1.5"},
            "wrong-value",
            {"name": "fragments", "value": 1.5},
        ),
        ({"sync_every": 4, "outer": "nesterov:lr=x"}, "wrong-value", {"value": "x"}),
        ({"sync_every": 4, "outer": "nesterov:fragments"}, "not-a-pair", {"text": "fragments"}),
        (
            {"sync_every": 4, "outer": "average:after=1,after=2"},
            "given-twice",
            {"name": "after", "where": "outer='average:after=1,after=2'"},
        ),
        ({"sync_every": 4, "outer": "nesterov:fragments=8"}, "too-many-fragments", {}),
        (
            {"sync_every": 4, "outer": "average:overlap=4"},
            "overlap-too-long",
            {"overlap": 4, "sync_every": 4},
        ),
        ({"staleness": 2}, "staleness-without-server", {"staleness": 2}),
        ({"update": "server", "staleness": -1}, "wrong-value", {"name": "staleness"}),
        ({"update": "server", "staleness": "soon"}, "wrong-value", {"value": "soon"}),
        ({"update": "server", "staleness": 1.5}, "wrong-value", {"value": 1.5}),
        ({"update": "server", "staleness": "nan"}, "wrong-value", {}),
        ({"exact": True, "compress": "bf16"}, "exact-with-compress", {"compress": "bf16"}),
        ({"exact": True, "sync_every": 2}, "exact-with-sync-every", {"sync_every": 2}),
        ({"exact": True, "update": "server"}, "exact-with-server", {"update": "server"}),
        ({"exact": True, "reduce": "central"}, "exact-with-reduce", {"reduce": "central"}),
        (
            {"compress": "bf16", "reduce": "central"},
            "compress-with-reduce",
            {"compress": "bf16", "reduce": "central"},
        ),
        (
            {"sync_every": 2, "update": "sharded"},
            "sync-every-with-update",
            {"sync_every": 2, "update": "sharded"},
        ),
        ({"weights": "shared"}, "weights-with-update", {"update": "replicated"}),
        ({"weights": "shared", "update": "server"}, "weights-with-update", {"update": "server"}),
        ({"weights": "one"}, "unknown-choice", {"choices": ["auto", "shared", "separate"]}),
        ({"update": "server", "compress": "bf16"}, "server-with-compress", {"compress": "bf16"}),
        ({"update": "server", "reduce": "native"}, "server-with-reduce", {"reduce": "native"}),
        ({"update": "server", "sync_every": 2}, "sync-every-with-update", {"update": "server"}),
        ({"mesh": "tensor=2", "exact": True}, "mesh-with-exact", {"mesh": "tensor=2"}),
        ({"mesh": "tensor=2", "compress": "int8"}, "mesh-with-compress", {"compress": "int8"}),
        ({"mesh": "tensor=2", "sync_every": 2}, "mesh-with-sync-every", {"sync_every": 2}),
        ({"mesh": "tensor=2", "update": "server"}, "mesh-with-server", {"update": "server"}),
        ({"mesh": "shard=2,pipeline=2"}, "mesh-shard-with-pipeline", {}),
        ({"mesh": "shard=2", "update": "sharded"}, "mesh-already-sharded", {"mesh": "shard=2"}),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        Parallelism(**given)


def test_a_refusal_names_both_options() -> None:
    with pytest.raises(UsageError) as caught:
        Parallelism(exact=True, reduce="ring")
    assert caught.value.sentence == (
        "reduce='ring' with exact=True: this algorithm adds in its own order. Leave reduce"
        " out, or choose native or shared_memory."
    )


def test_a_whole_number_may_be_written_as_a_decimal_one() -> None:
    """And `lr=1.0` is the training that `lr=1` was."""
    assert Parallelism(update="server", staleness=2.0).bound == 2
    assert Parallelism(update="server", staleness="2.0").bound == 2
    assert str(Outer.read("nesterov:lr=1.0,fragments=2.0")) == "nesterov:lr=1,fragments=2"
    with refused("wrong-value", name="data", value=2.0):  # an axis is counted
        Mesh.read("data=2.0")
