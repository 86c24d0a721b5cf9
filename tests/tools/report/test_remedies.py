"""What is advised would help, by about as much as is said, and is not in use already."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.settings import Settings
from lockstep.tools.report.judged import judged
from lockstep.tools.report.remedies import Advice, Straggler, deal
from lockstep.tools.report.verdict import verdict
from tests.training.synthetic import BASE, Extra, anatomy, begin, lines, planted

STEP = sum(BASE.values())


def advised(made: dict[int, list[dict[str, Any]]], **asked: Any) -> dict[str, Advice]:
    found = verdict(anatomy(made), Settings(task="digits", **asked))
    assert found is not None
    return {each.option: each for each in found.advice}


def test_the_loader_gain_is_what_is_left_without_it() -> None:
    (advice,) = advised(lines(2, 20, planted(1, "data", 0.2))).values()
    left = STEP - BASE["data"]
    assert advice.option == "--loader-workers 3"  # 204 ms over 71 ms
    assert advice.gain == pytest.approx((STEP + 0.2) / left - 1)


def test_loaders_that_are_too_few_become_more() -> None:
    """Two of them deliver a batch in a step of 275 ms, so 550 ms of work: for steps of 71 ms it
    takes 8.
    """
    found = advised(lines(2, 20, planted(1, "data", 0.2), loader_workers=2), loader_workers=2)
    assert list(found) == ["--loader-workers 8"]


def test_so_many_loaders_that_the_step_still_waits() -> None:
    (advice,) = advised(lines(2, 20, planted(1, "data", 3.0))).values()
    assert advice.option == "--loader-workers 16"
    assert advice.gain == pytest.approx((STEP + 3.0) / (3.004 / 16) - 1)


def test_micro_batches_are_whole_or_a_mean() -> None:
    found = judged(anatomy(lines(2, 20)).generations[0])
    assert found is not None

    def why(mine: float, others: float) -> str:
        return Straggler(place=0, share=0.1, cause="work", mine=mine, others=others).why(found)

    assert why(3.0, 2.0) == "3 micro-batches a step, others 2"
    assert why(1.0417, 0.9583) == "on average 1.04 micro-batches a step, others 0.96"


def test_no_core_is_free_for_a_loader() -> None:
    found = advised(lines(2, 20, planted(1, "data", 0.2), cores=2))
    assert found["--loader-workers 3"].gain is None
    assert "all cores are in use" in found["--loader-workers 3"].remark
    assert str(found["--loader-workers 3"]).endswith("(gain unknown: measure it).")


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"pieces": [1, 1, 1, 1]}, {}),  # nothing that could be dealt out otherwise
        ({"method": "local steps, synchronized every 8 steps, average"}, {"sync_every": 8}),
        ({"pieces": [3, 2, 1, 2]}, {}),  # in use: they would be equal
        ({}, {"balance": "auto", "workers": 4}),
    ],
)
def test_balance_is_not_advised_where_it_cannot_help(
    changes: dict[str, Any], asked: dict[str, Any]
) -> None:
    slow: tuple[Extra, ...] = (planted(2, "forward", 0.05), planted(2, "backward", 0.1))
    assert "--balance auto" in advised(lines(4, 20, *slow))
    assert "--balance auto" not in advised(lines(4, 20, *slow, **changes), **asked)


def test_an_update_that_is_slow_on_one_rank_is_nothing_to_share() -> None:
    assert "--update sharded" not in advised(lines(4, 20, planted(1, "optimizer", 0.2)))


def test_a_long_update_is_shared() -> None:
    long = {**BASE, "optimizer": 0.08}
    found = advised(lines(4, 20, base=long))
    whole = sum(long.values())
    assert found["--update sharded"].gain == pytest.approx(whole / (whole - 0.06) - 1)
    assert "--update sharded" not in advised(
        lines(4, 20, base=long, method="sharded"), update="sharded"
    )
    assert "--update sharded" not in advised(lines(1, 20, base=long))


NETWORK = {**BASE, "moving": 0.1, "data": 0.0}


def test_exposed_communication_over_a_network() -> None:
    found = advised(lines(4, 20, base=NETWORK, buckets=[8 * 2**20]))
    whole = sum(NETWORK.values())
    assert list(found) == ["--sync-every 8", "--compress bf16", "a global batch of 128"]
    assert found["--compress bf16"].gain == pytest.approx(whole / (whole - 0.05 - 0.0005) - 1)
    assert found["a global batch of 128"].gain == pytest.approx(2 * whole / (2 * whole - 0.1) - 1)


def test_one_bucket_hides_nothing() -> None:
    """The backward of one micro-batch is 20 ms: so much of the communication could go on behind
    it.
    """
    base = {**NETWORK, "moving": 0.02}
    found = advised(lines(4, 20, base=base, buckets=[8 * 2**20]))
    assert found["--bucket-mb 2"].gain == pytest.approx(
        sum(base.values()) / (sum(base.values()) - 0.015) - 1
    )
    assert "--bucket-mb 2" not in advised(lines(4, 20, base=base, buckets=[4 * 2**20, 4 * 2**20]))


@pytest.mark.parametrize(
    ("changes", "asked", "not_advised"),
    [
        ({}, {"compress": "int8"}, "--compress bf16"),
        ({}, {"exact": True}, "--compress bf16"),
        ({}, {"exact": True}, "--sync-every 8"),
        ({"reduction": "shared memory"}, {}, "--compress bf16"),
        ({"method": "sharded"}, {"update": "sharded"}, "--sync-every 8"),
        ({"method": "server, staleness 4"}, {"update": "server"}, "a global batch of 128"),
    ],
)
def test_what_is_in_use_or_cannot_be_had_is_not_advised(
    changes: dict[str, Any], asked: dict[str, Any], not_advised: str
) -> None:
    assert not_advised not in advised(lines(4, 20, base=NETWORK, **changes), **asked)


def test_what_gains_little_is_not_advised() -> None:
    assert not advised(lines(4, 20, base={**BASE, "data": 0.001, "optimizer": 0.001}))


def test_dealing_to_ranks_of_different_speed() -> None:
    assert deal(8, [1, 1, 1, 1], [0, 0, 0, 0]) == [2, 2, 2, 2]
    assert deal(9, [1, 2], [0, 0]) == [6, 3]
    assert deal(4, [1, 1], [0, 9]) == [4, 0]


def test_a_slow_computer_of_several_is_not_told_to_share_cores() -> None:
    made = lines(4, 8, cores=2)
    for rank in (2, 3):
        made[rank][0] = begin(rank, 4, host="bob", cores=2)
    assert "--workers 2" not in advised(made)
