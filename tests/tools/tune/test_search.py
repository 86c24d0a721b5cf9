"""The search alone, on figures that are made up: no process, no model, no clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.tune.search import (
    NO_TIME,
    Found,
    KnobRow,
    PairedTimes,
    Point,
    Refused,
    Tunable,
    Value,
    search,
)
from lockstep.training.metrics import typed

KNOBS = [
    Tunable(name="reduce", default="auto", others=("native",)),
    Tunable(name="threads", default=None, reason="one core a rank"),
    Tunable(name="loader_workers", default=0, others=(1, 2)),
]


@dataclass
class Fake:
    """A Bench of made-up seconds: `true(point)` with noise on top, on a clock that only it
    moves.
    """

    true: Callable[[Point], float]
    seconds: float = 1000.0
    noise: float = 0.0
    turns: int = 9
    random: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[tuple[dict[str, Value], dict[str, Value]]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def time(
        self, base: Point, candidate: Point, seconds: float
    ) -> tuple[list[float], list[float]]:
        self.asked.append((dict(base), dict(candidate)))
        self.shares.append(seconds)
        found = [], []  # type: tuple[list[float], list[float]]
        for _ in range(self.turns):
            for times, point in zip(found, (base, candidate), strict=True):
                times.append(self.true(point) * (1 + self.noise * self.random.random()))
                self.seconds -= times[-1]
        return found

    def left(self) -> float:
        return self.seconds

    def least(self, base: Point, candidate: Point) -> float:
        return 3 * (self.true(base) + self.true(candidate))


def product(**factors: Mapping[Value, float]) -> Callable[[Point], float]:
    """Every knob multiplies the time of a step."""

    def seconds(point: Point) -> float:
        found = 1.0
        for name, value in point.items():
            found *= factors.get(name, {}).get(value, 1.0)
        return found

    return seconds


def test_what_is_faster_is_kept_knob_by_knob_and_in_the_end_against_the_default() -> None:
    bench = Fake(product(reduce={"native": 0.8}, loader_workers={1: 0.9, 2: 0.7}))
    said: list[KnobRow] = []
    found = search(KNOBS, bench, said.append)
    assert found.winner == {"reduce": "native", "threads": None, "loader_workers": 2}
    assert found.changes == {"reduce": "native", "loader_workers": 2}
    default = {"reduce": "auto", "threads": None, "loader_workers": 0}
    native = {**default, "reduce": "native"}
    assert bench.asked == [
        (default, native),
        (native, {**native, "loader_workers": 1}),
        ({**native, "loader_workers": 1}, {**native, "loader_workers": 2}),
        (default, {**native, "loader_workers": 2}),
    ]
    assert found.final is not None
    assert found.final.ratio == pytest.approx(0.8 * 0.7)
    assert [(row.knob, row.value, row.won) for row in found.rows] == [
        ("reduce", "native", True),
        ("threads", None, False),
        ("loader_workers", 1, True),
        ("loader_workers", 2, True),
    ]
    assert found.rows[1].note == "one core a rank"
    assert tuple(said) == found.rows


def test_what_is_slower_or_a_tie_is_left_and_then_there_is_nothing_to_compare() -> None:
    found = search(KNOBS, Fake(product(reduce={"native": 1.3})))
    assert (found.changes, found.final) == ({}, None)
    assert all(not row.won for row in found.rows)


def test_what_won_by_chance_loses_in_the_end() -> None:
    """Fast as long as it is chosen by, slow when it counts: the last comparison has figures of
    its own.
    """
    bench = Fake(
        lambda point: 0.5 if point["reduce"] == "native" and len(bench.asked) == 1 else 1.0
    )
    found = search(KNOBS[:1], bench)
    assert found.rows[0].won
    assert found.final is not None
    assert (found.changes, found.final.ratio) == ({}, 1.0)


def test_knobs_that_are_good_one_by_one_and_bad_together() -> None:
    def seconds(point: Point) -> float:
        both = point["reduce"] == "native" and point["loader_workers"] == 1
        return (
            2.0
            if both and len(bench.asked) > 2
            else 1.0 - 0.1 * (point["reduce"] == "native") - 0.1 * (point["loader_workers"] == 1)
        )

    bench = Fake(seconds)
    found = search([KNOBS[0], Tunable(name="loader_workers", default=0, others=(1,))], bench)
    assert [row.won for row in found.rows] == [True, True]
    assert found.changes == {}


def test_time_is_shared_and_what_it_does_not_suffice_for_is_said() -> None:
    # a comparison of nine turns takes 13.5 of them
    bench = Fake(product(reduce={"native": 0.5}), seconds=19.0)
    found = search(KNOBS, bench)
    assert bench.shares[0] == pytest.approx(19 / 6)
    assert [row.note for row in found.rows] == ["", "one core a rank", NO_TIME, NO_TIME]
    assert found.changes == {"reduce": "native"}  # the last comparison was made all the same
    assert len(bench.asked) == 2
    assert min(bench.shares) >= 0


def test_without_any_time_the_default_wins() -> None:
    bench = Fake(product(), seconds=0.0)
    found = search(KNOBS, bench)
    assert (found.changes, found.final, bench.asked) == ({}, None, [])


def test_what_is_refused_is_said_and_the_search_goes_on() -> None:
    def seconds(point: Point) -> float:
        if point["reduce"] == "native":
            raise Refused("native is out of order today")
        return 0.5 if point["loader_workers"] else 1.0

    bench = Fake(seconds)
    bench.least = lambda base, candidate: 0.0  # type: ignore[method-assign]
    found = search(KNOBS, bench)
    assert found.rows[0].note == "native is out of order today"
    assert found.changes == {"loader_workers": 1}


def test_there_and_back_as_json() -> None:
    for true in (product(reduce={"native": 0.8}), product()):
        found = search(KNOBS, Fake(true))
        assert typed(Found, json.loads(json.dumps(asdict(found)))) == found


VALUES = st.lists(st.integers(1, 9), max_size=4, unique=True)


@given(
    st.lists(VALUES, min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.floats(0, 3),
    st.floats(0, 300),
    st.integers(3, 20),
)
def test_the_winner_was_faster_than_the_default_or_is_the_default(
    values: list[list[int]], seed: int, noise: float, seconds: float, turns: int
) -> None:
    knobs = [
        Tunable(
            name=f"knob {number}", default=0, others=tuple(others), reason="" if others else "none"
        )
        for number, others in enumerate(values)
    ]

    def true(point: Point) -> float:
        # any landscape, interactions included
        return 1 + 0.1 * random.Random(f"{seed} {sorted(point.items())}").random()

    bench = Fake(true, seconds=seconds, noise=noise, turns=turns, random=random.Random(seed))
    found = search(knobs, bench)
    assert set(found.winner) == {knob.name for knob in knobs}
    assert all(
        value in (0, *knob.others) for knob, value in zip(knobs, found.winner.values(), strict=True)
    )
    assert len(found.rows) == sum(max(1, len(knob.others)) for knob in knobs)
    if found.changes:
        assert found.final is not None
        assert found.final.ratio + found.final.noise < 1
        assert bench.asked[-1] == (found.default, found.winner)
        if noise == 0:
            assert true(found.winner) < true(found.default)


# -- faster means faster by more than what the machine's noise would explain ---------------------


@pytest.mark.parametrize(
    ("base", "candidate", "faster"),
    [
        ([1.0, 1.0, 1.0], [0.9, 0.9, 0.9], True),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0], [0.995, 0.995, 0.995], False),  # less than a per cent
        ([1.0, 1.0, 1.0, 1.0], [0.5, 1.4, 0.6, 1.2], False),  # the median is 0.9, and says nothing
        ([1.0, 5.0, 1.0, 5.0], [0.9, 4.5, 0.9, 4.5], True),  # what slows both is no noise
        ([1.0, 1.0, 1.0], [1.2, 1.2, 1.2], False),
    ],
)
def test_pairs_decide(base: list[float], candidate: list[float], faster: bool) -> None:
    assert PairedTimes.of(base, candidate).faster == faster


def test_the_figures() -> None:
    found = PairedTimes.of([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.turns, found.base, found.base_p25, found.candidate, found.candidate_p25) == (
        5,
        6.0,
        4.0,
        3.0,
        2.0,
    )
    assert (found.ratio, found.noise) == (0.5, 0.0)


def test_more_turns_have_less_noise() -> None:
    few, many = (
        PairedTimes.of([1.0] * 4 * times, [0.8, 0.9, 1.0, 0.9] * times) for times in (1, 25)
    )
    assert few.noise == pytest.approx(5 * many.noise)
    assert (few.faster, many.faster) == (True, True)
