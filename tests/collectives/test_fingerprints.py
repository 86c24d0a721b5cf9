"""Ranks that call different things, come too late or die: an error on all of them that says what
and where, before data is mixed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import collectives
from lockstep.collectives.fingerprints import listed
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    LockstepError,
    PeerFailed,
    WorkerFailed,
)
from lockstep.testing import run_ranks
from tests.refused import refused


def opposite_order(world: lockstep.World) -> tuple[str, list[float]]:
    a, b = torch.full((3,), 1.0 + world.rank), torch.full((3,), 100.0 * (1 + world.rank))
    try:
        if world.rank == 0:
            collectives.all_reduce(a)
            collectives.all_reduce(b)
        else:
            collectives.all_reduce(b)
            collectives.all_reduce(a)
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error), [a[0].item(), b[0].item()]
    return "nothing said", [a[0].item(), b[0].item()]


def test_m7_equal_shapes_in_opposite_order() -> None:
    for rank, (message, values) in enumerate(run_ranks(opposite_order, 2)):
        assert re.fullmatch(
            r"#1: rank 0 all_reduce sum f32\[3\] at test_fingerprints.py:\d+; rank 1 all_reduce sum"
            r" f32\[3\] at test_fingerprints.py:\d+\. "
            r"The ranks called equal collectives from different lines\. .* \[collective-places-differ\]",
            message,
        )
        assert values == [1.0 + rank, 100.0 * (1 + rank)]  # nothing was mixed


def different_sizes(world: lockstep.World) -> str:
    try:
        collectives.all_reduce(torch.zeros(6 if world.rank == 1 else 4))
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error)
    return "nothing said"


def test_m22_different_sizes_do_not_abort_in_c() -> None:
    for message in run_ranks(different_sizes, 3):
        assert re.match(
            r"#1: ranks 0,2 all_reduce sum f32\[4\] at test_fingerprints.py:\d+; rank 1 all_reduce sum"
            r" f32\[6\] at test_fingerprints.py:\d+\. .* \[collective-mismatch\]$",
            message,
        )


def different_kinds(world: lockstep.World) -> str:
    tensor = torch.zeros(3, dtype=torch.int64)
    try:
        handle = collectives.all_reduce(torch.zeros(1024), async_op=True)
        handle.wait()
        if world.rank == 2:
            collectives.all_gather(tensor)
        else:
            collectives.all_reduce(torch.zeros(1024), async_op=True).wait()
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error)
    return "nothing said"


def test_different_kinds_also_asynchronously() -> None:
    for message in run_ranks(different_kinds, 3):
        assert re.match(
            r"#2: ranks 0,1 all_reduce sum f32\[1024\] at .*; rank 2 all_gather i64\[\*\] at ",
            message,
        )


def uneven(world: lockstep.World) -> str:
    try:
        for _ in range(5 + world.rank):
            collectives.all_reduce(torch.zeros(8))
        world.close()
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error)
    return "nothing said"


def test_m21_a_rank_that_ends_early_is_named_on_all_ranks() -> None:
    for message in run_ranks(uneven, 2):
        assert re.match(
            r"#6: rank 0 end of the world \(close\); rank 1 all_reduce sum f32\[8\] at"
            r" test_fingerprints.py:\d+\.",
            message,
        )


def dies(world: lockstep.World) -> None:
    collectives.all_reduce(torch.zeros(8))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with refused("peer-has-ended", PeerFailed, peer=1, number=2) as caught:
        collectives.all_reduce(torch.zeros(9))
    last = "its last collective was #1: all_reduce sum f32[8] at test_fingerprints.py"
    assert caught.value.values["last"].startswith(last)
    raise LockstepError("as expected")


def test_a_dead_rank_is_an_error_and_no_hang() -> None:
    with pytest.raises(WorkerFailed, match="killed by signal 9"):
        run_ranks(dies, 2)


def late(world: lockstep.World, flag: str) -> str:
    world.group.timeout = timedelta(seconds=0.3)
    if world.rank == 0:
        try:
            collectives.all_reduce(torch.zeros(8))
        except CollectiveTimeout as error:
            open(flag, "w").close()
            world.close(failed=True)
            return f"{error.missing} {re.sub(r':[0-9]+', ':N', str(error))}"
    while not os.path.exists(flag):  # alive, but elsewhere, until rank 0 has given up
        time.sleep(0.01)
    world.close(failed=True)
    return ""


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    assert (
        run_ranks(late, 2, args=(str(tmp_path / "given-up"),))[0]
        == "(1,) #1: all_reduce sum f32[8] at test_fingerprints.py:N: rank 1 did not come within the"
        " timeout of 0.3 s. Look in the logs of these ranks, or raise --timeout. [collective-timeout]"
    )


def far_ahead(world: lockstep.World) -> float:
    """Hundreds in flight: more than the page remembers."""
    tensors = [torch.full((4,), float(number)) for number in range(400)]
    handles = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()
    return sum(tensor[0].item() for tensor in tensors)


def test_hundreds_in_flight() -> None:
    assert run_ranks(far_ahead, 2) == [2 * sum(range(400))] * 2


def test_ranks_are_listed_shortly() -> None:
    assert [listed(ranks) for ranks in ([2], [0, 1], [0, 1, 2, 3], [0, 2, 3])] == [
        "rank 2",
        "ranks 0,1",
        "ranks 0-3",
        "ranks 0,2,3",
    ]
