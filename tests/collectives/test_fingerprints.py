"""Ranks that call different things, come too late or die: an error on all that says who."""

from __future__ import annotations

import mmap
import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives import fingerprints
from lockstep.collectives.fingerprints import BLOCK, HostFingerprints, listed
from lockstep.collectives.group import Group
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    LockstepError,
    PeerFailed,
    WorkerFailed,
)
from lockstep.runtime.processes import DEAD
from lockstep.testing import run_ranks
from tests.collectives.own_groups import group_of_its_own
from tests.refused import refused
from tests.teams import on_team

HERE = r"at test_fingerprints\.py:\d+"
MIXED_UP = rf"rank 0 all_reduce sum f32\[3\] {HERE}; rank 1 all_reduce sum f32\[3\] {HERE}"
OF_OTHER_SIZES = rf"ranks 0,2 all_reduce sum f32\[3\] {HERE}; rank 1 all_reduce sum f32\[2\] {HERE}"
OF_OTHER_KINDS = rf"ranks 0,1 all_reduce sum f32\[1024\] {HERE}; rank 2 all_gather i64\[\*\] {HERE}"


def m7_opposite_order(group: Group, tensor: Tensor) -> None:
    other = tensor.clone()
    if group.rank == 0:
        collectives.all_reduce(tensor, group=group)
        collectives.all_reduce(other, group=group)
    else:
        collectives.all_reduce(other, group=group)
        collectives.all_reduce(tensor, group=group)


def m22_different_sizes(group: Group, tensor: Tensor) -> None:
    collectives.all_reduce(tensor[:2] if group.rank == 1 else tensor, group=group)


def different_kinds(group: Group, tensor: Tensor) -> None:
    collectives.all_reduce(torch.zeros(1024), group=group, async_op=True).wait()
    if group.rank == 2:
        collectives.all_gather(tensor.long(), group=group)
    else:
        collectives.all_reduce(torch.zeros(1024), group=group, async_op=True)
        group.wait_for_all(group.number)


def mismatch(
    world: lockstep.World, attempt: Callable[[Group, Tensor], None]
) -> tuple[str, dict[str, Any], list[float]]:
    tensor = torch.full((3,), 1.0 + world.rank)
    with pytest.MonkeyPatch.context() as patch, group_of_its_own(world) as group:
        # on a busy machine the third rank may come later than half a second
        patch.setattr(fingerprints, "_LET_THE_OTHERS_COME", 60.0)
        with pytest.raises(CollectiveMismatch) as caught:
            attempt(group, tensor)
    return caught.value.code, caught.value.values, tensor.tolist()


@pytest.mark.parametrize(
    ("attempt", "workers", "code", "number", "calls"),
    [
        (m7_opposite_order, 2, "collective-places-differ", 1, MIXED_UP),
        (m22_different_sizes, 3, "collective-mismatch", 1, OF_OTHER_SIZES),
        (different_kinds, 3, "collective-mismatch", 2, OF_OTHER_KINDS),
    ],
)
def test_different_collectives_are_told_on_all_ranks_and_nothing_is_mixed(
    attempt: Callable[[Group, Tensor], None], workers: int, code: str, number: int, calls: str
) -> None:
    for rank, (raised, values, tensor) in enumerate(on_team(mismatch, workers, (attempt,))):
        assert (raised, values["number"]) == (code, number)
        assert re.fullmatch(calls, values["calls"])
        assert tensor == [1.0 + rank] * 3


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
            rf"#6: rank 0 end of the world \(close\); rank 1 all_reduce sum f32\[8\] {HERE}\.",
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


def late(world: lockstep.World) -> list[tuple[dict[str, Any], str]]:
    errors = []
    for algorithm in ("native", "shared_memory"):
        with group_of_its_own(world) as group:
            group.timeout = timedelta(seconds=0.3)
            if world.rank == 0:
                with pytest.raises(CollectiveTimeout) as caught:
                    collectives.all_reduce(torch.zeros(8), algorithm=algorithm, group=group)
                errors.append((caught.value.values, str(caught.value)))
            world.barrier()  # rank 1 is alive, but elsewhere, until rank 0 has given up
    return errors


def test_a_rank_that_does_not_come_is_named() -> None:
    for values, message in on_team(late, 2)[0]:
        assert re.fullmatch(rf"all_reduce sum f32\[8\] {HERE}", values["call"])
        assert (values["number"], values["missing"], values["seconds"]) == (1, [1], 0.3)
        assert "rank 1 did not come within the timeout of 0.3 s" in message


def far_ahead(world: lockstep.World) -> float:
    """Hundreds in flight: more than the page remembers."""
    tensors = [torch.full((4,), float(number)) for number in range(400)]
    handles = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
    for handle in handles:
        handle.wait()
    return sum(tensor[0].item() for tensor in tensors)


def test_hundreds_in_flight() -> None:
    assert on_team(far_ahead, 2) == [2 * sum(range(400))] * 2


def test_ranks_are_listed_shortly() -> None:
    texts = {listed(ranks) for ranks in ([2], [0, 1], [0, 1, 2, 3], [0, 2, 3])}
    assert texts == {"rank 2", "ranks 0,1", "ranks 0-3", "ranks 0,2,3"}


def test_a_look_for_the_dead_asks_for_one_rank_and_for_the_next_one_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks wait and look. If each asked for all others, that would be N x N questions."""
    asked: list[int] = []

    def state(pid: int) -> str:
        asked.append(pid)
        return DEAD if pid == 107 else "sleeping"

    monkeypatch.setattr(fingerprints, "state", state)
    memory = mmap.mmap(-1, 9 * BLOCK)
    page = HostFingerprints(memory, 2, range(9))
    for rank in range(9):  # the pid is the third number of a rank's block
        memory[rank * BLOCK + 16 : rank * BLOCK + 24] = (100 + rank).to_bytes(8, "little")
    page.post(1, "all_reduce")
    for looks in range(4):
        page.look(1)
        assert len(asked) == looks + 1
    with refused("peer-has-ended", PeerFailed, peer=7, number=1):
        for _ in range(5):
            page.look(1)
    assert len(set(asked)) == len(asked)
    page.close()
