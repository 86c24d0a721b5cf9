"""Which ways to train go together, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.parallelism import Compression, Outer, Parallelism, Server
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("bf16", Compression("bf16")),
        ("int8", Compression("int8")),
        ("powersgd:4", Compression("powersgd", 4)),
        ("topk:0.01", Compression("topk", 0.01)),
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
    assert Server.read("server:shards=2,lr=by-age") == Server(2, "by-age")
    assert Parallelism(update="server").bound == 4
    assert Parallelism(update="server", staleness="inf").bound == float("inf")
    assert Parallelism(update="server", staleness=0).alone


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reduce": "gossip"}, "reduce='gossip' is unknown: choose one of auto, native, "),
        ({"update": "zero"}, "update='zero' is unknown: choose one of replicated, sharded, server"),
        ({"update": "sharded:shards=2"}, "is unknown: choose one of replicated"),
        (
            {"compress": "gzip"},
            "compress='gzip' is unknown: choose one of bf16, fp16, int8, powersgd:RANK, topk:SHARE",
        ),
        ({"compress": "powersgd"}, "compress='powersgd': say which rank, as in powersgd:4"),
        ({"compress": "powersgd:1.5"}, "a whole number of at least 1"),
        ({"compress": "powersgd:0"}, "a whole number of at least 1"),
        ({"compress": "topk:2"}, "lies between 0 and 1, as in topk:0.01"),
        ({"compress": "topk:x"}, "'x' is no number"),
        ({"compress": "bf16:3"}, "is unknown"),
        ({"sync_every": 0}, "sync_every=0: give a whole number of steps of at least 1"),
        ({"sync_every": 2.0}, "sync_every=2.0"),
        ({"sync_every": True}, "sync_every=True"),
        ({"outer": "nesterov"}, "give sync_every too"),
        (
            {"sync_every": 4, "outer": "median"},
            "outer='median' is unknown: choose one of average, nesterov",
        ),
        (
            {"sync_every": 4, "outer": "average:lr=1"},
            "an average has neither lr nor momentum; choose nesterov",
        ),
        ({"sync_every": 4, "outer": "nesterov:lr=0"}, "lr is a number above 0"),
        ({"sync_every": 4, "outer": "nesterov:momentum=1"}, "momentum one from 0 to below 1"),
        (
            {"sync_every": 4, "outer": "nesterov:momenta=1"},
            "there is no option 'momenta'; there are lr, momentum, after, fragments, overlap",
        ),
        (
            {"sync_every": 4, "outer": "nesterov:fragments=1.5"},
            "fragments is a whole number of at least 1",
        ),
        (
            {"sync_every": 4, "outer": "nesterov:fragments"},
            "options are written nesterov:name=value,name=value, each once",
        ),
        (
            {"sync_every": 4, "outer": "nesterov:fragments=8"},
            "so many fragments do not fit between two meetings",
        ),
        (
            {"sync_every": 4, "outer": "average:overlap=4"},
            "a meeting must be over before the next one of the same fragment",
        ),
        ({"staleness": 2}, "give update='server' too"),
        ({"update": "server", "staleness": -1}, "a whole number from 0, or inf"),
        ({"update": "server", "staleness": "soon"}, "a whole number from 0, or inf"),
        ({"update": "server", "staleness": 1.5}, "a whole number from 0, or inf"),
        ({"update": "server:shards=0"}, "shards is a whole number of at least 1"),
        ({"update": "server:lr=older"}, "server has the options shards=N and lr=by-age"),
        (
            {"exact": True, "compress": "bf16"},
            "compress='bf16' with exact: what it computes depends on the number of workers",
        ),
        ({"exact": True, "sync_every": 2}, "sync_every=2 with exact"),
        ({"exact": True, "update": "server"}, "update='server' with exact"),
        (
            {"exact": True, "reduce": "central"},
            "reduce='central' with exact: it adds in an order of its own",
        ),
        (
            {"compress": "bf16", "reduce": "central"},
            "compressed gradients have carriers of their own; leave reduce out",
        ),
        (
            {"sync_every": 2, "update": "sharded"},
            "ranks that step alone each need a whole optimizer; choose replicated",
        ),
        (
            {"update": "server", "compress": "bf16"},
            "what a server is told travels as it is; leave one out",
        ),
        (
            {"update": "server", "reduce": "native"},
            "a server adds gradients up itself; leave reduce out",
        ),
        ({"update": "server", "sync_every": 2}, "choose replicated"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Parallelism(**given)
    assert said in str(refused.value)
