"""Who takes part, and what follows: played through without a socket, a clock or a process."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from lockstep.launcher.failures import Failure, Kind, Standing
from lockstep.launcher.hosts.channel import Message
from lockstep.launcher.hosts.membership import LAST_CALL_SECONDS, Membership
from lockstep.launcher.hosts.messages import Newcomer, Report, Roll
from lockstep.launcher.hosts.plan import Plan

ANNA, BERT, CARL = 1, 2, 3
NAMES = {ANNA: "anna", BERT: "bert", CARL: "carl"}


def plan(least: int, most: int, restarts: int = 0, **more: Any) -> Plan:
    return Plan(least=least, most=most, meet="anna", restarts=restarts, **more)


def newcomer(key: int, **changes: Any) -> Newcomer:
    name = NAMES[key]
    return replace(Newcomer(name=name, address=f"10.0.0.{key}", pid=key, workers=2, hosting=key == ANNA), **changes)


def failure(rank: int, at: int, kind: Kind = "exception", standing: Standing = "cause") -> Failure:
    code = 137 if kind == "signal" else 1
    return Failure(rank=rank, kind=kind, message="boom", code=code, pid=9, host="h", monotonic_ns=at, standing=standing)


class Play:
    """A membership, and what it has told whom since it was last asked."""

    def __init__(self, plan: Plan) -> None:
        self.stores: list[int] = []
        self.all = Membership(plan, 0.0, self.store)

    def store(self, size: int) -> tuple[str, int]:
        self.stores.append(size)
        return "10.0.0.1", 1000 + len(self.stores)

    def joined(self, *keys: int, now: float = 0.0, **changes: Any) -> Play:
        for key in keys:
            self.all.join(key, newcomer(key, **changes), now)
        self.all.tick(now)
        return self

    def told(self, key: int | None = None) -> list[Message] | dict[int, list[str]]:
        found, self.all.outbox = self.all.outbox, []
        if key is not None:
            return [message for to, message in found if to == key]
        return {to: [message["kind"] for other, message in found if other == to] for to, _ in found}


def test_the_ranks_follow_the_order_of_arrival_or_of_the_numbers_that_were_given() -> None:
    play = Play(plan(3, 3)).joined(BERT, ANNA)
    assert play.told() == {}
    play.joined(CARL, workers=3)
    rolls = [Roll.of(message) for _, message in play.all.outbox]
    assert rolls[0].hosts == ["bert (10.0.0.2)", "anna (10.0.0.1)", "carl (10.0.0.3)"]
    assert [(roll.index, roll.first_rank, roll.share, roll.size, roll.port) for roll in rolls] == [
        (0, 0, 2, 7, 1001),
        (1, 2, 2, 7, 1001),
        (2, 4, 3, 7, 1001),
    ]
    play = Play(plan(3, 3)).joined(BERT, node_rank=2).joined(ANNA).joined(CARL, node_rank=0)
    assert [key for key, _ in play.all.outbox] == [CARL, ANNA, BERT]


def test_where_all_end_well_all_hear_it() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.all.report(ANNA, Report(), 1.0)
    assert play.all.end is None
    play.all.report(BERT, Report(), 2.0)
    assert play.all.end is not None
    assert (play.all.end.code, play.all.end.failure) == (0, None)


def test_the_first_failure_of_all_hosts_counts_by_kind_and_then_by_time() -> None:
    def blamed(first: Failure, second: Failure) -> int:
        play = Play(plan(2, 2)).joined(ANNA, BERT)
        play.told()
        play.all.report(ANNA, Report(failure=first), 1.0)
        assert play.told() == {BERT: ["stop"]}
        assert play.all.end is None
        play.all.report(BERT, Report(failure=second), 1.1)
        assert play.all.end is not None
        assert play.all.end.failure is not None
        assert play.all.end.code == play.all.end.failure.code
        return play.all.end.failure.rank

    assert blamed(failure(0, 5), failure(2, 4)) == 2
    assert blamed(failure(0, 4), failure(2, 5)) == 0
    assert blamed(failure(0, 4, standing="consequence"), failure(2, 5)) == 2
    assert blamed(failure(0, 4), failure(2, 5, kind="signal")) == 2
    assert blamed(failure(0, 4, standing="timeout"), failure(2, 5, standing="consequence")) == 0


def test_a_host_that_has_gone_is_the_cause_and_ends_a_fixed_run() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.told()
    play.all.leave(BERT, "has gone", 3.0)
    assert play.told() == {ANNA: ["stop"]}
    play.all.report(ANNA, Report(failure=failure(0, 2_000_000_000, standing="consequence")), 3.5)
    end = play.all.end
    assert end is not None
    assert end.failure is not None
    assert (end.code, end.failure.host, end.failure.message) == (1, "bert (10.0.0.2)", "has gone; with it went ranks 2 and 3 of 4")


def test_with_n_m_what_is_left_goes_on_at_once_and_who_comes_back_is_taken_in_at_a_checkpoint() -> None:
    play = Play(plan(1, 2, restarts=1)).joined(ANNA, BERT)
    play.told()
    play.all.leave(BERT, "has gone", 3.0)
    play.all.report(ANNA, Report(failure=failure(0, 1, standing="consequence")), 3.5)
    assert play.told() == {ANNA: ["stop", "again"]}
    play.all.tick(3.6)
    (message,) = play.told(ANNA)
    assert Roll.of(message).workers == [2]
    play.joined(BERT, now=4.0)
    assert play.told() == {ANNA: ["grow"]}
    play.all.report(ANNA, Report(grown=True), 5.0)
    assert play.told() == {ANNA: ["again"], BERT: ["again"]}
    play.all.tick(5.1)
    assert play.told() == {ANNA: ["roll"], BERT: ["roll"]}
    assert play.stores == [4, 2, 4]
    play.all.leave(BERT, "has gone", 6.0)
    play.all.report(ANNA, Report(), 6.5)
    assert play.all.end is not None, "the one restart is used up"
    assert play.all.end.code == 1


def test_a_killed_rank_begins_anew_and_an_exception_does_not() -> None:
    for kind, again in (("signal", True), ("loader", True), ("exception", False), ("usage", False)):
        play = Play(plan(1, 2, restarts=3)).joined(ANNA, BERT)
        play.told()
        play.all.report(BERT, Report(failure=failure(2, 1, kind=kind)), 1.0)  # type: ignore[arg-type]
        play.all.report(ANNA, Report(failure=failure(0, 2, standing="consequence")), 1.0)
        assert (play.all.end is None) == again, kind


def test_with_too_few_left_a_run_waits_for_who_may_come_back() -> None:
    play = Play(plan(2, 3, restarts=1, join_timeout=10.0)).joined(ANNA, BERT).joined(now=LAST_CALL_SECONDS + 1)
    assert play.told() == {ANNA: ["roll"], BERT: ["roll"]}
    play.all.leave(BERT, "has gone", 20.0)
    play.all.report(ANNA, Report(), 20.0)
    play.all.tick(21.0)
    assert play.told() == {ANNA: ["stop", "again"]}
    play.joined(CARL, now=22.0)
    assert play.told() == {ANNA: ["roll"], CARL: ["roll"]}
    play.all.leave(CARL, "has gone", 23.0)
    play.all.report(ANNA, Report(), 23.0)
    assert play.all.end is not None


def test_the_first_generation_waits_for_more_than_the_least_but_not_for_long() -> None:
    play = Play(plan(1, 3)).joined(ANNA).joined(BERT, now=3.0)
    play.all.tick(3.0 + LAST_CALL_SECONDS)
    assert play.told() == {}
    play.all.tick(3.1 + LAST_CALL_SECONDS)
    assert play.told() == {ANNA: ["roll"], BERT: ["roll"]}
    play = Play(plan(1, 3)).joined(BERT).joined(now=100.0)
    assert "roll" not in str(play.told()), "the first host, whose process holds the store, takes part"


def test_it_is_said_who_is_here_and_who_is_missing_and_after_a_time_that_ends_it() -> None:
    play = Play(plan(3, 3, join_timeout=20.0)).joined(ANNA, node_rank=0).joined(CARL, node_rank=2)
    play.all.tick(5.1)
    line = "2 of --nodes 3 are here: anna (10.0.0.1), carl (10.0.0.3); 1 more must come (--node-rank 1)"
    assert play.told(ANNA) == [{"kind": "waiting", "line": line}]
    play.all.tick(6.0)
    assert play.told() == {}, "once"
    play.all.tick(20.1)
    assert play.all.end is not None
    assert (play.all.end.code, play.all.end.line) == (
        1,
        f"error: after 20 s {line}; start the command on every host, or give fewer --nodes",
    )


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            {"node_rank": 1},
            {"node_rank": 1},
            "--node-rank 1 is claimed twice, by anna (10.0.0.1) pid 1 and bert (10.0.0.2) pid 2: give every host a number of its own",
        ),
        (
            {"facts": {"--nodes": "2"}},
            {"facts": {"--nodes": "3"}},
            "--nodes is 2 on anna (10.0.0.1) and 3 on bert (10.0.0.2): give the same command on every host",
        ),
        (
            {"facts": {"torch": "2.13.0"}},
            {"facts": {"torch": "2.12.0"}},
            "torch is 2.13.0 on anna (10.0.0.1) and 2.12.0 on bert (10.0.0.2): install the same version on every host",
        ),
        (
            {"facts": {}},
            {"facts": {"epochs": "3"}},
            "epochs is not given on anna (10.0.0.1) and 3 on bert (10.0.0.2): give the same command on every host",
        ),
    ],
)
def test_hosts_that_do_not_agree_are_told_both_values(first: Any, second: Any, sentence: str) -> None:
    fixed = Play(plan(2, 2)).joined(ANNA, **first).joined(BERT, **second)
    assert fixed.all.end is not None
    assert (fixed.all.end.code, fixed.all.end.line) == (2, f"error: {sentence}")
    elastic = Play(plan(1, 2)).joined(ANNA, **first)
    elastic.joined(BERT, **second)
    assert elastic.all.end is None, "a wrong newcomer does not end a run that can do without"
    (message,) = elastic.told(BERT)
    assert (message["kind"], message["line"]) == ("end", f"error: {sentence}")


def test_one_too_many_is_sent_away() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.told()
    play.joined(CARL)
    (message,) = play.told(CARL)
    assert message["line"] == "error: the run has begun without carl (10.0.0.3): --nodes 2 are complete"
    play = Play(plan(1, 2)).joined(ANNA, BERT)
    play.told()
    play.joined(CARL)
    (message,) = play.told(CARL)
    assert message["line"].endswith("one too many for --nodes 1:2: anna (10.0.0.1), bert (10.0.0.2) are here already")
    assert play.all.end is None


def test_a_host_that_is_stopped_leaves_and_the_first_one_ends_the_run() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.told()
    play.all.report(BERT, Report(signal=signal.SIGTERM), 1.0)
    assert play.told() == {BERT: ["end"], ANNA: ["stop"]}
    play.all.report(ANNA, Report(), 1.5)
    assert play.all.end is not None
    assert play.all.end.failure is not None
    assert (play.all.end.code, play.all.end.failure.message) == (143, "was stopped by signal 15 (SIGTERM); with it went ranks 2 and 3 of 4")
    play = Play(plan(1, 2, restarts=3)).joined(ANNA, BERT)
    play.all.report(ANNA, Report(signal=signal.SIGINT), 1.0)
    assert play.all.end is not None
    assert (play.all.end.code, play.all.end.line) == (
        130,
        "anna (10.0.0.1), where the hosts meet, was stopped by signal 2 (SIGINT); all ranks have ended",
    )


def test_a_host_that_goes_after_it_has_reported_takes_nothing_with_it() -> None:
    play = Play(plan(2, 2)).joined(ANNA, BERT)
    play.all.report(BERT, Report(failure=failure(2, 1)), 1.0)
    play.all.leave(BERT, "has gone", 1.1)
    play.all.report(ANNA, Report(), 1.5)
    assert play.all.end is not None
    assert play.all.end.failure is not None
    assert (play.all.end.failure.kind, play.all.end.failure.rank, play.all.end.code) == ("exception", 2, 1)


def test_who_leaves_before_it_begins_is_only_missing() -> None:
    play = Play(plan(2, 2)).joined(ANNA)
    play.all.leave(ANNA, "has gone", 1.0)
    play.joined(BERT, now=2.0)
    assert play.told() == {}
    play.joined(ANNA, now=3.0)
    assert play.told() == {BERT: ["roll"], ANNA: ["roll"]}
