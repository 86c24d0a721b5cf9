"""Where the time went, and what to do first."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.settings import Settings
from lockstep.tools.report.verdict import Verdict, verdict
from tests.training.synthetic import BASE, anatomy, lines, noisy, planted

QUIET = {**BASE, "data": 0.0001, "moving": 0.0001, "other": 0.0, "checks": 0.0}


def of(made: dict[int, list[dict[str, Any]]], **asked: Any) -> Verdict:
    found = verdict(anatomy(made), Settings(task="digits", **asked))
    assert found is not None
    return found


def test_a_slow_rank_is_named_with_its_phase_and_both_times() -> None:
    found = of(lines(4, 20, planted(3, "data", 0.05)))
    first = found.do_first
    assert (first.cause, first.rank, first.phase) == ("late", 3, "data")
    assert "rank 3" in first.sentence
    assert "54 ms a step, others 4" in first.sentence
    assert (found.first, found.last) == (4, 20)
    plain = json.loads(json.dumps(found.as_json()))
    assert plain["sentences"] == [first.sentence, *found.reasons()]
    assert plain["do_first"]["rank"] == 3
    assert plain["shares"] == dict(found.shares)
    assert found.parts()[:3] == [
        (52, "forward, backward and optimizer"),
        (30, "waiting for late ranks"),
        (13, "waiting for data"),
    ]


@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "moving", "other"])
def test_the_rank_and_the_phase_are_named(phase: str, data: st.DataObject) -> None:
    workers = data.draw(st.integers(3, 64), "workers")  # of two, half of a delay is each one's own
    who = data.draw(st.integers(0, workers - 1), "who")
    noise = noisy(data.draw(st.integers(0, 99), "seed"), data.draw(st.floats(0, 0.5), "noise"))
    made = lines(workers, 8, planted(who, phase), noise)
    first = of(made).do_first
    assert (first.cause, first.rank, first.phase) == ("late", who, phase)


def test_shares_are_of_all_ranks_time_and_add_up() -> None:
    found = of(lines(4, 20, planted(3, "data", 0.05), noisy(1, 0.5)))
    assert sum(found.shares.values()) == pytest.approx(1)
    plain = of(lines(2, 20)).shares
    whole = sum(BASE.values())
    assert plain["data"] == pytest.approx(BASE["data"] / whole)
    assert plain["communication"] == pytest.approx(BASE["moving"] / whole)


def test_nothing_is_lost() -> None:
    found = of(lines(4, 20, base=QUIET))
    assert found.do_first.cause == "nothing"
    assert found.parts() == [(100, "forward, backward and optimizer")]
    # a delay that the others share is nobody's
    shared = of(lines(4, 12, lambda rank, step, phase: 0.2 if phase == "forward" else 0.0))
    assert shared.shares["useful"] > 0.9
    assert shared.do_first.cause == "nothing"
    # a single step is not judged
    assert of(lines(2, 1, planted(1, "forward"))).do_first.cause == "nothing"
    assert verdict(anatomy(lines(2, 0))) is None


@pytest.mark.parametrize("workers", [1, 4])
def test_all_loaders_are_slow(workers: int) -> None:
    first = of(lines(workers, 20, base={**BASE, "data": 0.1}, loader_workers=3)).do_first
    assert (first.cause, first.rank) == ("data", None)
    assert first.share == pytest.approx(0.1 / (sum(BASE.values()) - 0.004 + 0.1))
    assert "100 ms a step" in first.sentence
    assert "--loader-workers 3" in first.sentence


def test_communication_that_nothing_hides() -> None:
    first = of(lines(4, 20, base={**BASE, "moving": 0.1})).do_first
    assert (first.cause, first.rank) == ("communication", None)
    assert "100 ms a step" in first.sentence
    alone = of(lines(1, 20, base={**BASE, "moving": 0.1}))
    assert alone.do_first.cause == "nothing"  # there is nobody to communicate with
    assert alone.shares["other"] > 0.5


def test_ranks_that_are_slow_in_turn_are_not_blamed() -> None:
    def in_turn(rank: int, step: int, phase: str) -> float:
        return 0.1 if step % 4 == rank and phase == "forward" else 0.0

    first = of(lines(4, 43, in_turn)).do_first
    assert (first.cause, first.rank) == ("late", None)


def test_ranks_that_share_cores_are_not_blamed() -> None:
    slow = planted(1, "forward")
    first = of(lines(4, 40, slow, cores=2)).do_first
    assert (first.cause, first.rank) == ("late", None)
    assert "2 cores of anna" in first.sentence
    assert of(lines(4, 40, slow, cores=4)).do_first.rank == 1
    assert of(lines(2, 40, slow, cores=4, threads=4)).do_first.rank is None
    assert of(lines(4, 40, slow, cores=2, device="cuda:0")).do_first.rank == 1


def test_steps_that_are_computed_again() -> None:
    """Killed after step 20, resumed from step 5: 15 of 35 steps were computed for nothing."""
    made, later = lines(2, 20, base=QUIET), lines(2, 15, base=QUIET, first=6)
    for rank, each in later.items():
        made[rank] += each
    first = of(made).do_first
    assert (first.cause, first.share) == ("restarts", pytest.approx(15 / 35))
    resumed = lines(2, 20, base=QUIET)
    for rank, each in lines(2, 15, base=QUIET, first=21).items():
        resumed[rank] += each
    assert of(resumed).do_first.cause == "nothing"


@pytest.mark.parametrize(
    "method", ["server, staleness 4", "local steps, synchronized every 8 steps, average"]
)
def test_ranks_that_do_not_wait(method: str) -> None:
    found = of(lines(4, 20, planted(3, "forward"), method=method, lost=False))
    assert found.do_first.rank is None
    assert len(found.notes) == 1
    assert method in found.notes[0]


def test_the_longest_stretch_is_judged() -> None:
    made, later = lines(4, 10, planted(1, "forward")), lines(3, 30, planted(2, "data"), first=11)
    for rank, each in later.items():
        made[rank] += each
    found = of(made)
    assert (found.do_first.rank, found.do_first.phase) == (2, "data")
    assert (found.ranks, found.first, found.last) == (3, 14, 40)
    assert "started 2 times" in found.notes[0]


def test_missing_ranks_and_damage_are_told() -> None:
    made = lines(4, 10)
    del made[1], made[3]
    found = verdict(type(anatomy(made))(starts=anatomy(made).starts, unread={0: 1, 2: 2}))
    assert found is not None
    missing, unread = found.notes
    assert missing.startswith("Ranks 1 and 3 of 4")
    assert unread.startswith("3 lines of ranks 0 and 2")


def test_on_a_mesh_replicas_are_compared() -> None:
    """Ranks 2 and 3 hold the second replica; its pipeline's stages take different times, as
    those of the first do.
    """

    def stages(rank: int, step: int, phase: str) -> float:
        return (0.1 if rank % 2 else 0.0) * (phase == "backward")

    def slow(rank: int, step: int, phase: str) -> float:
        return 0.05 * (rank >= 2) * (phase == "forward")

    made = lines(4, 12, stages, slow, lost=False)
    for rank, each in made.items():
        for line in each[1:]:
            # world ranks
            line["lost"] = {"3": 0.01} if rank == 2 else {} if rank == 3 else {"3": 0.05}
            line["waits"] = sum(line["lost"].values())
            line["exposed"] = line["moving"] + line["waits"]
    first = of(made, workers=4, mesh="data=2,pipeline=2").do_first
    assert (first.cause, first.rank, first.phase) == ("late", 1, "forward")
    assert "replica 1 (ranks 2 and 3)" in first.sentence
    assert "70 ms a step, others 20" in first.sentence


def test_lines_over_several_steps_count_as_many() -> None:
    made = lines(3, 9, planted(1, "forward"))
    for each in made.values():
        last = each[-1]
        for name, value in last.items():
            last[name] = 8 * value if isinstance(value, float) else value
        last["lost"] = {rank: 8 * seconds for rank, seconds in last.get("lost", {}).items()}
        last |= {"first": 9, "last": 16, "micro_batches": 16}
    found = of(made)
    assert found.last == 16
    assert "220 ms a step, others 20" in found.do_first.sentence
