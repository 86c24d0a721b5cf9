"""Which ways to train go together, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Compression, Outer, Parallelism
from tests.refused import refused


def test_compressions() -> None:
    for text, read in (
        ("bf16", Compression("bf16")),
        ("int8", Compression("int8")),
        ("powersgd:4", Compression("powersgd", 4)),
    ):
        assert Compression.read(text) == read
        assert str(read) == text
        assert Parallelism(compress=text) == Parallelism(compress=text)
        for compress in (read, text):
            assert Parallelism(compress=compress).recipe() == {"compress": text}


def test_meetings() -> None:
    for text, read in (
        ("average", Outer()),
        ("nesterov", Outer("nesterov")),
        ("nesterov:lr=0.5", Outer("nesterov", lr=0.5)),
        ("average:after=100", Outer(after=100)),
        ("nesterov:fragments=4,overlap=2", Outer("nesterov", fragments=4, overlap=2)),
    ):
        assert Outer.read(text) == read
        assert str(read) == text


def test_values_that_are_as_always_are_not_said() -> None:
    same = Parallelism(sync_every=8, outer="nesterov:lr=0.7,momentum=0.9")
    assert same.recipe() == {"sync_every": 8, "outer": "nesterov"}
    assert Parallelism(sync_every=8).recipe() == Parallelism(sync_every=8, outer="average").recipe()
    assert Parallelism().recipe() == Parallelism(update="sharded", reduce="central").recipe() == {}


def test_servers() -> None:
    assert Parallelism(update="server").bound == 4
    assert Parallelism(update="server", staleness="inf").bound == float("inf")
    assert Parallelism(update="server", staleness=0).alone


OUTER: dict[str, tuple[str, dict[str, Any]]] = {
    "median": ("unknown-choice", {"name": "outer", "value": "median"}),
    "average:lr=1": ("average-with-lr", {}),
    "nesterov:lr=0": ("wrong-value", {"name": "lr", "value": 0}),
    "nesterov:lr=x": ("wrong-value", {"name": "lr", "value": "x"}),
    "nesterov:momentum=1": ("wrong-value", {"name": "momentum", "value": 1}),
    "nesterov:momenta=1": ("unknown-name", {"name": "momenta", "meant": "did you mean momentum?"}),
    "nesterov:fragments=1.5": ("wrong-value", {"name": "fragments", "value": 1.5}),
    "nesterov:fragments": ("not-a-pair", {"text": "fragments"}),
    "nesterov:fragments=8": ("too-many-fragments", {}),
    "average:after=1,after=2": ("given-twice", {"name": "after"}),
    "average:overlap=4": ("overlap-too-long", {"overlap": 4, "sync_every": 4}),
}
"""With sync_every=4: the code, and values of its error."""
SERVER = {"update": "server"}
REFUSED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"reduce": "gossip"}, "unknown-choice", {"name": "reduce", "value": "gossip"}),
    ({"update": "zero"}, "unknown-choice", {"choices": ["replicated", "sharded", "server"]}),
    ({"update": "sharded:shards=2"}, "unknown-choice", {"value": "sharded:shards=2"}),
    ({"compress": "gzip"}, "unknown-choice", {"name": "compress", "value": "gzip"}),
    ({"compress": "bf16:3"}, "unknown-choice", {"value": "bf16:3"}),
    ({"sync_every": 0}, "wrong-value", {"name": "sync_every", "value": 0}),
    ({"outer": "nesterov"}, "outer-without-sync-every", {"outer": "nesterov"}),
    ({"staleness": 2}, "staleness-without-server", {"staleness": 2}),
    ({"exact": True, "compress": "bf16"}, "exact-with-compress", {"compress": "bf16"}),
    ({"exact": True, "sync_every": 2}, "exact-with-sync-every", {"sync_every": 2}),
    ({"exact": True, **SERVER}, "exact-with-server", SERVER),
    ({"exact": True, "reduce": "central"}, "exact-with-reduce", {"reduce": "central"}),
    ({"compress": "bf16", "reduce": "ring"}, "compress-with-reduce", {"reduce": "ring"}),
    ({"sync_every": 2, "update": "sharded"}, "sync-every-with-update", {"update": "sharded"}),
    ({"weights": "shared"}, "weights-with-update", {"update": "replicated"}),
    ({"weights": "shared", **SERVER}, "weights-with-update", SERVER),
    ({"weights": "one"}, "unknown-choice", {"choices": ["auto", "shared", "separate"]}),
    ({"compress": "bf16", **SERVER}, "server-with-compress", {"compress": "bf16"}),
    ({"reduce": "native", **SERVER}, "server-with-reduce", {"reduce": "native"}),
    ({"sync_every": 2, **SERVER}, "sync-every-with-update", SERVER),
    ({"mesh": "tensor=2", "exact": True}, "mesh-with-exact", {"mesh": "tensor=2"}),
    ({"mesh": "tensor=2", "compress": "int8"}, "mesh-with-compress", {"compress": "int8"}),
    ({"mesh": "tensor=2", "sync_every": 2}, "mesh-with-sync-every", {"sync_every": 2}),
    ({"mesh": "tensor=2", **SERVER}, "mesh-with-server", {"mesh": "tensor=2"}),
    ({"mesh": "shard=2,pipeline=2"}, "mesh-shard-with-pipeline", {}),
    ({"mesh": "shard=2", "update": "sharded"}, "mesh-already-sharded", {"mesh": "shard=2"}),
]


def test_what_makes_no_sense_is_refused() -> None:
    for options, code, values in REFUSED:
        with refused(code, **values):
            Parallelism(**options)
    for text, (code, values) in OUTER.items():
        with refused(code, **values):
            Parallelism(sync_every=4, outer=text)
    for compress in ("powersgd", "powersgd:1.5", "powersgd:0", "powersgd:inf"):
        with refused("powersgd-without-rank", compress=compress):
            Parallelism(compress=compress)
    for staleness in (-1, "soon", 1.5, "nan"):
        with refused("wrong-value", name="staleness"):
            Parallelism(update="server", staleness=staleness)


def test_a_whole_number_may_be_written_as_a_decimal_one() -> None:
    """And `lr=1.0` is the training that `lr=1` was."""
    assert Parallelism(update="server", staleness=2.0).bound == 2
    assert Parallelism(update="server", staleness="2.0").bound == 2
    assert str(Outer.read("nesterov:lr=1.0,fragments=2.0")) == "nesterov:lr=1,fragments=2"
    precise = Outer("nesterov", lr=0.12345678)  # no digit is lost on the way to other processes
    assert Outer.read(str(precise)) == precise
    with refused("wrong-value", name="data", value=2.0):  # an axis is counted
        Mesh.read("data=2.0")
