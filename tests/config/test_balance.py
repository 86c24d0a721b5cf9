"""What may be asked for about ranks of different speed, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.balance import Balance
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError


@pytest.mark.parametrize("given", ["auto", "2,1,1", "0.5,0,3"])
def test_text_there_and_back(given: str) -> None:
    assert str(Balance.of(given)) == given


def test_numbers_are_as_good_as_text() -> None:
    assert Balance.of((2, 1, 1)) == Balance.of([2.0, 1.0, 1.0]) == Balance.of("2, 1,1")
    assert Balance.of("auto") == Balance()
    assert Balance.of("auto").measured
    assert not Balance.of("1").measured


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "balance='': give auto, or a number for each rank, such as 2,1,1"),
        ("Auto", "balance='Auto': give auto, or a number for each rank"),
        ("2;1", "balance='2;1': give auto, or a number for each rank"),
        ("2,,1", "balance='2,,1': give auto"),
        (5, "balance=5: give auto"),
        (["2", None], "balance='2,None': '2' is no share"),
        (
            "2,-1",
            (
                "balance='2,-1': -1.0 is no share; give auto, or a number from 0 for each rank, not"
                " all 0, such as 2,1,1"
            ),
        ),
        ("nan,1", "balance='nan,1': nan is no share"),
        ("inf,1", "balance='inf,1': inf is no share"),
        ((True, 1), "balance='1,1': True is no share"),
        ("0,0", "balance='0,0': nobody would have anything to do"),
        ((), "balance='': nobody would have anything to do"),
    ],
)
def test_what_is_no_balance_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Balance.of(given)


@pytest.mark.parametrize(
    ("given", "method", "message"),
    [
        (
            "2,1,1",
            Parallelism(),
            "balance='2,1,1' gives 3 of 2 workers a share: give one number for each of them",
        ),
        ("1", Parallelism(), "balance='1' gives 1 of 2 workers a share"),
        (
            "auto",
            Parallelism(update="server"),
            (
                "balance='auto' with update='server': ranks draw micro-batches as fast as they are;"
                " leave balance out"
            ),
        ),
        ("2,1", Parallelism(update="server"), "balance='2,1' with update='server'"),
        (
            "auto",
            Parallelism(sync_every=4),
            (
                "balance='auto' with sync_every=4: ranks that step alone do not tell each other how"
                " long they take"
            ),
        ),
        (
            "2,1",
            Parallelism(mesh=Mesh(tensor=2)),
            (
                "balance='2,1' with mesh='tensor=2': ranks that hold parts of one model take as"
                " long as the slowest"
            ),
        ),
        (
            "auto",
            Parallelism(mesh=Mesh(data=2, shard=2)),
            "balance='auto' with mesh='data=2,shard=2'",
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(given: str, method: Parallelism, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Balance.of(given).check(method, 2)


def test_it_goes_with_the_rest() -> None:
    for method in (
        Parallelism(),
        Parallelism(exact=True),
        Parallelism(update="sharded"),
        Parallelism(compress="bf16"),
        Parallelism(mesh=Mesh(data=2)),
    ):
        Balance.of("auto").check(method, 2)
        Balance.of("2,1").check(method, 2)
    Balance.of("2,1").check(Parallelism(sync_every=4), 2)
