"""What may be asked for about ranks of different speed, and what is said of the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lockstep.config.balance import Balance
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from tests.refused import refused


@pytest.mark.parametrize("given", ["auto", "2,1,1", "0.5,0,3"])
def test_text_there_and_back(given: str) -> None:
    assert str(Balance.of(given)) == given


def test_numbers_are_as_good_as_text() -> None:
    assert Balance.of((2, 1, 1)) == Balance.of([2.0, 1.0, 1.0]) == Balance.of("2, 1,1")
    assert Balance.of("auto") == Balance()
    assert Balance.of("auto").measured
    assert not Balance.of("1").measured


@pytest.mark.parametrize(
    ("given", "code", "values"),
    [
        ("", "wrong-type", {"name": "balance", "value": ""}),
        ("Auto", "wrong-type", {"value": "Auto"}),
        ("2;1", "wrong-type", {"value": "2;1"}),
        ("2,,1", "wrong-type", {"value": "2,,1"}),
        (5, "wrong-type", {"value": 5}),
        (["2", None], "number-out-of-range", {"name": "share", "value": "2"}),
        ("2,-1", "number-out-of-range", {"value": -1.0}),
        ("inf,1", "number-out-of-range", {"value": math.inf}),
        ((True, 1), "number-out-of-range", {"value": True}),
        ("0,0", "nobody-has-work", {"balance": "0,0"}),
        ((), "nobody-has-work", {"balance": ""}),
    ],
)
def test_what_is_no_balance_is_refused(given: Any, code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        Balance.of(given)


def test_a_share_that_is_no_number_is_refused_with_all_shares() -> None:
    with refused("number-out-of-range") as caught:
        Balance.of("nan,1")
    assert str(caught.value) == (
        "balance='nan,1': share=nan: give a number of at least 0. [number-out-of-range]"
    )


@pytest.mark.parametrize(
    ("given", "method", "code", "values"),
    [
        ("2,1,1", {}, "balance-of-other-count", {"balance": "2,1,1", "given": 3, "workers": 2}),
        ("1", {}, "balance-of-other-count", {"balance": "1", "given": 1, "workers": 2}),
        ("auto", {"update": "server"}, "balance-with-server", {"update": "server"}),
        ("2,1", {"update": "server"}, "balance-with-server", {"balance": "2,1"}),
        ("auto", {"sync_every": 4}, "balance-with-sync-every", {"sync_every": 4}),
        ("2,1", {"mesh": Mesh(tensor=2)}, "balance-with-mesh", {"mesh": "tensor=2"}),
        (
            "auto",
            {"mesh": Mesh(data=2, shard=2)},
            "balance-with-mesh",
            {"balance": "auto", "mesh": "data=2,shard=2"},
        ),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    given: str, method: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with refused(code, **values):
        Balance.of(given).check(Parallelism(**method), 2)


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
