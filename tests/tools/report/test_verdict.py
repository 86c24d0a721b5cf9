"""What is said of a training, whole sentences.

A host whose link is slow is named from the connections of all ranks, whichever way it is
slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.settings import Settings
from lockstep.tools.report.judged import percentages, ranks
from lockstep.tools.report.verdict import SlowLink, Verdict, slow_link, verdict
from tests.training.synthetic import BASE, Extra, anatomy, lines, noisy, planted

QUIET = {**BASE, "data": 0.0001, "moving": 0.0001, "other": 0.0, "checks": 0.0}
LIGHT = {**BASE, "data": 0.001}


def of(made: dict[int, list[dict[str, Any]]], **asked: Any) -> Verdict:
    found = verdict(anatomy(made), Settings(task="digits", **asked))
    assert found is not None
    return found


def test_a_slow_loader_of_one_rank() -> None:
    found = of(lines(4, 20, planted(3, "data", 0.05)))
    assert found.sentences() == [
        "Use --loader-workers 1: about 76 % faster.",
        "4 ranks: 52 % efficient. Lost 48 %: 30 % waiting for rank 3 (its loader: 54 ms a step,"
        " others 4), 13 % waiting for data (rank 3: 54 ms a step), 3 % exposed all-reduce, 2 %"
        " other.",
    ]
    shares = found.shares()
    assert [share for share, _ in shares] == [52, 30, 13, 3, 2]
    assert (found.first, found.last) == (4, 20)


def test_what_is_lost_adds_up() -> None:
    found = of(lines(4, 20, planted(3, "data", 0.05), noisy(1, 0.5)))
    assert found.efficiency + sum(each.share for each in found.lost) == pytest.approx(1)


def test_nothing_is_lost() -> None:
    assert of(lines(4, 20, base=QUIET)).sentences() == [
        "Use --update sharded: about 6 % faster.",
        "4 ranks: 100 % efficient.",
    ]


def test_one_rank_waits_for_nobody() -> None:
    found = of(lines(1, 10, planted(0, "data", 0.05)))
    (sentence,) = found.reasons()
    assert sentence.startswith(
        "1 rank: 52 % efficient. Lost 48 %: 43 % waiting for data (54 ms a step)"
    )
    assert not any("--update" in action for action in found.actions())


def test_all_loaders_are_slow() -> None:
    found = of(lines(4, 20, base={**BASE, "data": 0.1}))
    (sentence,) = found.reasons()
    assert "waiting for data (100 ms a step)" in sentence
    assert "waiting for rank" not in sentence
    assert found.actions()[0] == "Use --loader-workers 2: about 2.4 times as fast."


def test_ranks_that_are_slow_in_turn_are_not_blamed() -> None:
    def in_turn(rank: int, step: int, phase: str) -> float:
        return 0.1 if step % 4 == rank and phase == "forward" else 0.0

    found = of(lines(4, 43, in_turn))
    assert not found.stragglers
    assert (
        "43 % waiting for a different rank in each step (step times vary by 43 %)"
        in found.reasons()[0]
    )


def test_two_stragglers() -> None:
    """Rank 2 is last in odd steps, rank 0 in even ones, both always behind ranks 1 and 3."""

    def slow(rank: int, step: int, phase: str) -> float:
        return {
            (2, "backward"): 0.06 + 0.02 * (step % 2),
            (0, "data"): 0.08 - 0.02 * (step % 2),
        }.get((rank, phase), 0.0)

    found = of(lines(4, 43, slow))
    assert {(each.place, each.cause) for each in found.stragglers} == {(2, "backward"), (0, "data")}
    sentence = found.reasons()[0]
    assert "waiting for rank 2 (its backward: 110 ms a step, others 40)" in sentence
    assert "waiting for rank 0 (its loader: 74 ms a step, others 4)" in sentence


def test_who_would_be_next() -> None:
    found = of(lines(4, 20, planted(1, "data", 0.05), planted(2, "backward", 0.08)))
    assert [each.place for each in found.stragglers] == [2]
    assert found.reasons()[1] == "The next slowest is rank 1 (its loader: 54 ms a step, others 4)."


def test_forward_and_backward_are_slower_together() -> None:
    found = of(lines(4, 20, planted(2, "forward", 0.02), planted(2, "backward", 0.04), base=LIGHT))
    assert (
        "waiting for rank 2 (its forward and backward: 120 ms a step, others 60)"
        in found.reasons()[0]
    )
    assert [str(each) for each in found.advice] == ["Use --balance auto: about 29 % faster."]


def test_more_micro_batches_are_no_slowness() -> None:
    pieces = (3, 3, 2)

    def work(rank: int, step: int, phase: str) -> float:
        return 0.5 * (pieces[rank] - 2) * BASE[phase] if phase in ("forward", "backward") else 0.0

    found = of(lines(3, 20, work, pieces=pieces, global_batch=64))
    assert [(each.place, each.cause) for each in found.stragglers] == [(0, "work")]
    first, second = found.reasons()
    assert "waiting for rank 0 (3 micro-batches a step, others 2)" in first
    assert not any("--balance" in action for action in found.actions())
    assert (
        second
        == "8 micro-batches do not divide by 3 ranks: some ranks have 3, some 2. With 4 ranks each has 2."
    )


def test_fewer_micro_batches_than_ranks() -> None:
    assert of(lines(4, 8, global_batch=16)).notes == (
        "There are 2 micro-batches for 4 ranks: 2 ranks have none.",
    )


def test_ranks_that_share_cores() -> None:
    found = of(lines(4, 40, noisy(1, 2.0), cores=2, reduction="shared memory"))
    first, second = found.reasons()
    assert found.actions() == [
        "Try --workers 2: each worker then has a core of its own (gain unknown: measure it)."
    ]
    assert first.startswith("4 ranks: ")
    assert second.startswith("4 ranks share the 2 cores of anna, and slow each other down")
    threads = of(lines(2, 8, cores=4, threads=4))
    assert threads.notes[0].startswith("2 ranks of 4 threads each share the 4 cores of anna")
    assert "--threads 2" in [each.option for each in threads.advice]
    assert not of(lines(4, 8, cores=2, device="cuda:0")).notes


@pytest.mark.parametrize(
    "method", ["server, staleness 4", "local steps, synchronized every 8 steps, average"]
)
def test_ranks_that_do_not_wait(method: str) -> None:
    found = of(lines(4, 20, planted(3, "data"), method=method))
    assert not found.stragglers
    assert found.notes == (f"Ranks do not wait for each other in a step ({method}).",)


def test_a_single_step() -> None:
    found = of(lines(2, 1, planted(1, "forward")))
    assert [(each.place, each.cause) for each in found.stragglers] == [(1, "forward")]
    assert found.notes == (
        "Only step 1 was recorded: one step is too few to judge, and a first step also warms up.",
    )
    assert not found.advice


def test_no_step_at_all() -> None:
    assert verdict(anatomy(lines(2, 0))) is None


def test_the_longest_stretch_is_judged() -> None:
    made, later = lines(4, 10, planted(1, "forward")), lines(3, 30, planted(2, "data"), first=11)
    for rank, each in later.items():
        made[rank] += each
    found = of(made)
    assert [(each.place, each.cause) for each in found.stragglers] == [(2, "data")]
    assert (
        found.notes[0]
        == "The training was started 2 times. The figures are of the longest stretch: steps 14 to 40, on 3 ranks."
    )


def test_missing_ranks_and_damage_are_told() -> None:
    made = lines(4, 10)
    del made[1], made[3]
    found = verdict(type(anatomy(made))(generations=anatomy(made).generations, unread={0: 1, 2: 2}))
    assert found is not None
    assert found.notes == (
        "Ranks 1 and 3 of 4 left no record: the figures are of the others.",
        "3 lines of ranks 0 and 2 could not be read and are left out.",
    )


def test_long_pauses_are_told() -> None:
    made = lines(2, 10)
    for each in made.values():
        each.append({"kind": "pause", "what": "evaluate", "step": 10, "seconds": 1.0})
        each.append({"kind": "pause", "what": "checkpoint", "step": 10, "seconds": 0.01})
    assert of(made).notes == (
        "Time outside steps is not in these figures: 1.0 s in evaluations (57 %) of 1.8 s.",
    )


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
    found = of(made, workers=4, mesh="data=2,pipeline=2")
    assert [(each.place, each.cause) for each in found.stragglers] == [(1, "forward")]
    assert (
        "waiting for replica 1 (ranks 2 and 3) (its forward: 70 ms a step, others 20)"
        in found.reasons()[0]
    )


def test_its_part_of_sums_in_shared_memory_is_no_network() -> None:
    found = of(lines(3, 12, planted(1, "moving"), reduction="shared memory"))
    assert [(each.place, each.cause) for each in found.stragglers] == [(1, "network")]
    assert (
        "waiting for rank 1 (its part of the all-reduce: 203 ms a step, others 3)"
        in found.reasons()[0]
    )


def test_lines_over_several_steps_count_as_many() -> None:
    made = lines(2, 9, planted(1, "forward"))
    for each in made.values():
        last = each[-1]
        each[-1] = {
            name: 8 * value if isinstance(value, float) else value for name, value in last.items()
        }
        each[-1] |= {
            "lost": {who: 8 * seconds for who, seconds in last.get("lost", {}).items()},
            "first": 9,
            "last": 16,
            "micro_batches": 16,
        }
    found = of(made)
    (straggler,) = found.stragglers
    assert (straggler.mine, straggler.others) == pytest.approx((0.22, 0.02))
    assert found.last == 16


def extra_of(kind: str) -> Extra:
    return {"loader": planted(2, "data", 0.1), "noise": noisy(3, 1.0)}[kind]


@pytest.mark.parametrize("kind", ["loader", "noise"])
def test_as_json(kind: str) -> None:
    found = of(lines(3, 12, extra_of(kind)))
    whole = found.as_json()
    assert whole["sentences"] == found.sentences()
    assert whole["efficiency"] == found.efficiency
    assert [each["cause"] for each in whole["stragglers"]] == (["data"] if kind == "loader" else [])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(any))
def test_percentages_add_up_and_are_near(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    found = percentages(shares)
    assert sum(found) == 100
    assert all(
        abs(share - 100 * exact) < 1.0001 for share, exact in zip(found, shares, strict=True)
    )


def test_ranks_in_words() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([0, 2]) == "ranks 0 and 2"
    assert ranks([0, 1, 2, 5]) == "ranks 0, 1, 2 and 5"
    assert ranks(range(9)) == "ranks 0, 1, 2 and 6 more"


FAST, SLOW = 100e6, 10e6
HOSTS = ["anna", "bob", "cleo", "dora"]


def made(
    hosts: int, rate: Callable[[int, int], float], ring: bool = False, sent: int = 2**24
) -> dict[int, list[dict[str, object]]]:
    """A rank a host; `rate(source, target)` in bytes a second. Everybody is connected to
    everybody; in a ring little goes to the others.
    """
    found = lines(hosts, 8, base={**BASE, "moving": 0.1})
    for rank, each in found.items():
        each[0] |= {"host": HOSTS[rank]}
        to = []
        for peer in range(hosts):
            size = sent if not ring or peer == (rank + 1) % hosts else 100
            busy = size / rate(rank, peer)
            if peer != rank:
                to.append(link(rank, f"10.0.0.{peer}", size, busy))
        each.append({"kind": "links", "step": 8, "to": to})
    return found


def link(rank: int, peer: str, sent: int, busy: float) -> dict[str, object]:
    return {
        "here": f"10.0.0.{rank}",
        "peer": peer,
        "rtt": 0.001,
        "busy": busy,
        "sent": sent,
        "retransmitted": 0,
        "rate": sent / busy,
    }


def found_in(rows: dict[int, list[dict[str, object]]]) -> SlowLink | None:
    return slow_link(anatomy(rows).generations[0])


WAYS: dict[str, Callable[[int, int], bool]] = {
    "sends slowly": lambda source, target: source == 2,
    "is sent to slowly": lambda source, target: target == 2,
    "both": lambda source, target: 2 in (source, target),
}


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_slow_host_is_named(way: str, hosts: int) -> None:
    slow = found_in(made(hosts, lambda source, target: SLOW if WAYS[way](source, target) else FAST))
    assert slow == SlowLink(
        ranks=(2,), host="cleo", towards=None, rate=pytest.approx(SLOW), others=pytest.approx(FAST)
    )


def test_in_a_ring_both_neighbours_of_the_slow_host_are_slow() -> None:
    slow = found_in(
        made(4, lambda source, target: SLOW if 2 in (source, target) else FAST, ring=True)
    )
    assert slow == SlowLink(
        ranks=(2,), host="cleo", towards=None, rate=pytest.approx(SLOW), others=pytest.approx(FAST)
    )


def test_quick_connections_may_be_far_apart() -> None:
    """In a ring of gradients they are busy for so short a time that their rate says little."""
    quick = {(3, 0): FAST, (0, 1): FAST / 8}
    slow = found_in(
        made(4, lambda source, target: quick.get((source, target), SLOW / 5), ring=True)
    )
    assert slow is not None
    assert (slow.ranks, slow.towards) == ((2,), None)


def test_of_a_single_slow_connection_the_sender_is_named_and_where_it_goes() -> None:
    slow = found_in(made(3, lambda source, target: SLOW if source == 2 else FAST, ring=True))
    assert slow is not None
    assert (slow.ranks, slow.towards) == ((2,), "anna")
    pair = found_in(made(2, lambda source, target: SLOW if source == 1 else FAST))
    assert pair is not None
    assert (pair.ranks, pair.towards) == ((1,), "anna")


@pytest.mark.parametrize("hosts", [2, 3])
def test_links_that_are_alike_are_nobodys(hosts: int) -> None:
    assert found_in(made(hosts, lambda source, target: FAST * (1 + 0.1 * source))) is None


def test_two_slow_hosts_are_not_one() -> None:
    assert found_in(made(4, lambda source, target: SLOW if source < 2 else FAST)) is None


def test_an_address_is_named_where_its_host_left_no_file() -> None:
    rows = made(4, lambda source, target: SLOW if target == 2 else FAST)
    del rows[2]
    slow = found_in(rows)
    assert slow is not None
    assert (slow.ranks, slow.host) == ((), "10.0.0.2")


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_store_of_checkpoints_is_no_host_of_the_training(hosts: int) -> None:
    rows = made(hosts, lambda source, target: FAST)
    rows[0].append({"kind": "links", "step": 8, "to": [link(0, "52.1.2.3", 2**26, 2**26 / SLOW)]})
    assert found_in(rows) is None
    rows = made(hosts, lambda source, target: SLOW if source == 1 else FAST)
    rows[0].append({"kind": "links", "step": 8, "to": [link(0, "52.1.2.3", 2**26, 2**26 / SLOW)]})
    found = found_in(rows)
    assert found is not None
    assert found.ranks == (1,)


def test_a_few_bytes_say_nothing() -> None:
    assert (
        found_in(made(3, lambda source, target: SLOW if source == 2 else FAST, sent=1000)) is None
    )


def test_without_links_there_is_none() -> None:
    assert found_in(lines(2, 3)) is None


def test_the_verdict_says_whose_network_it_is() -> None:
    found = verdict(anatomy(made(3, lambda source, target: SLOW if source == 2 else FAST)))
    assert found is not None
    assert (
        "exposed all-reduce, slowed by rank 2's network (10 MB/s, others 100 MB/s)"
        in found.reasons()[0]
    )
