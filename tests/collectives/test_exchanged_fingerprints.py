"""Ranks on several hosts compare collectives where asked to. The hosts are this one, renamed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

import lockstep
from lockstep import collectives
from lockstep.collectives.exchanged_fingerprints import ExchangedFingerprints
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    WorkerFailed,
)
from lockstep.testing import run_ranks
from tests.collectives.own_groups import on_hosts


@contextmanager
def compared(world: lockstep.World, timeout: float = 20) -> Iterator[lockstep.World]:
    """The same ranks again, each said to be alone on its host."""
    options = {"tags": "all", "timeout": timedelta(seconds=timeout)}
    with on_hosts(world, [1] * world.size, **options) as apart:
        assert isinstance(apart.group.fingerprints, ExchangedFingerprints)
        yield apart


def different_kinds(world: lockstep.World) -> str:
    with compared(world) as apart:
        collectives.all_reduce(torch.ones(2))
        try:
            if apart.rank == 2:
                collectives.all_gather(torch.ones(3, dtype=torch.int64))
            else:
                collectives.all_reduce(torch.ones(1024))
        except CollectiveMismatch as error:
            return str(error)
    return "nothing said"


def test_a_mismatch_is_told_on_all_ranks_before_anything_is_sent() -> None:
    first, *others = run_ranks(different_kinds, 3)
    assert others == [first] * 2
    assert re.fullmatch(
        r"#2: ranks 0,1 all_reduce sum f32\[1024\] at test_exchanged_fingerprints.py:\d+; rank 2 all_gather"
        r" i64\[\*\] at test_exchanged_fingerprints.py:\d+\. "
        r"All ranks must call the same collectives in the same order\. \[collective-mismatch\]",
        first,
    )


def training(world: lockstep.World) -> tuple[list[float], list[float]]:
    model = torch.nn.Linear(3, 1)
    x = torch.full((4, 3), 1.0 + world.rank)
    with compared(world) as apart:
        stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in stepper.micro_batches([x][: apart.rank + 1]):
            stepper.backward(model(batch).sum(), weight=4)
        stepper.step()
        return (
            model.weight.flatten().tolist(),
            apart.group.all_gather(model.weight.detach()).flatten().tolist(),
        )


def one_rank_is_late(world: lockstep.World) -> tuple[str, tuple[int, ...]]:
    try:
        with compared(world, timeout=5) as apart:
            if apart.rank == 1:
                apart._store.wait(["the others gave up"], timedelta(minutes=5))
                raise KeyboardInterrupt
            try:
                collectives.all_reduce(torch.ones(2))
            finally:
                apart._store.set("the others gave up", "")
    except CollectiveTimeout as error:
        return str(error), error.missing
    except KeyboardInterrupt:
        pass
    return "", ()


def without(world: lockstep.World) -> bool:
    world.close()
    with lockstep.init(backend="gloo", tags="off") as plain:
        collectives.all_reduce(torch.ones(2))
        return not plain.group.fingerprints.compares


def one_after_the_other(world: lockstep.World) -> tuple[bool, Any, tuple[str, tuple[int, ...]]]:
    return without(world), training(world), one_rank_is_late(world)


def test_training_goes_on_as_without_and_a_rank_that_does_not_come_is_named() -> None:
    first, second = run_ranks(one_after_the_other, 2)
    compares_nothing, (weights, everyones), (message, missing) = first
    assert compares_nothing
    assert everyones == weights * 2
    assert weights == second[1][0]
    assert missing == (1,)
    assert re.fullmatch(
        r"#1: all_reduce sum f32\[2\] at test_exchanged_fingerprints.py:\d+: rank 1 did not come within the"
        r" timeout of 5 s\. .* \[collective-timeout\]",
        message,
    )


def one_rank_dies(world: lockstep.World) -> None:
    with compared(world) as apart:
        collectives.all_reduce(torch.ones(2))
        if apart.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises((PeerFailed, CollectiveTimeout)) as caught:
            collectives.all_reduce(torch.ones(2))
        assert caught.value.code in ("peer-left-collective", "collective-timeout")
        values = caught.value.values
        assert (values["number"], values["who"]) == (2, "rank 1")
        assert values["call"].startswith("all_reduce sum f32[2] at ")


def test_a_rank_that_has_died_is_named() -> None:
    with pytest.raises(WorkerFailed) as failed:
        run_ranks(one_rank_dies, 2)
    assert failed.value.rank == 1
    assert "SIGKILL" in str(failed.value)
