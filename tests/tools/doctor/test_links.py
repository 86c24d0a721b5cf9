"""Which link is slow, from planted figures; what ranks measure, and whether wrong sums are seen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from lockstep import World, collectives
from lockstep.tools.doctor import links
from lockstep.tools.doctor.examine import judge_sums, wrong_sums
from lockstep.tools.doctor.links import MeasuredLink
from lockstep.tools.finding import Finding
from tests.teams import on_team


def _links(**slow: float) -> list[MeasuredLink]:
    """Three hosts whose links carry 1 GB/s, but for those given as a_b."""
    pairs = [(a, b) for a in "abc" for b in "abc" if a != b]
    return [MeasuredLink(a, b, 50e-6, slow.get(f"{a}_{b}", 1e9)) for a, b in pairs]


def test_the_slow_link_is_named_and_only_it() -> None:
    assert links.judge(_links(), hosts=True).level == "ok"
    assert links.judge([], hosts=False).level == "ok"
    found = links.judge(_links(b_c=0.4e9), hosts=True)
    assert found.level == "fix"
    assert found.fix.startswith(
        "slow link, b to c: 400.0 MB/s, 0.05 ms, where 1.00 GB/s or more is expected"
    )
    assert links.judge(_links(b_c=0.6e9), hosts=True).level == "ok"
    assert links.judge(_links(b_c=0.4e9), hosts=False).level == "warn"


def test_links_that_are_all_slow_are_named_between_hosts() -> None:
    both = [MeasuredLink("a", "b", 1e-3, 5e6), MeasuredLink("b", "a", 1e-3, 5e6)]
    found = links.judge(both, hosts=True)
    assert (
        "slow links, a to b: 5.0 MB/s, 1.00 ms; b to a: 5.0 MB/s, 1.00 ms, where 60.0 MB/s or more"
        in found.fix
    )
    assert links.judge(both, hosts=False).level == "ok"


def _measure(world: World) -> tuple[list[MeasuredLink], list[str]]:
    measured = links.measure(world.group, ["x", "y", "z"], world.device, hosts=False)
    return measured, wrong_sums(world.group, world.device, ["native", "shared_memory"])


def test_every_pair_is_measured_in_both_directions_and_sums_are_right() -> None:
    answers = on_team(_measure, 3)
    assert answers[0] == answers[1] == answers[2]
    measured, wrong = answers[0]
    ends = [(link.source, link.target) for link in measured]
    assert ends == list(itertools.permutations("xyz", 2))
    assert all(link.latency > 0 and link.bandwidth > 0 for link in measured)
    assert wrong == []


LATE = 1.2  # seconds: 64 MiB, the most that is sent, are then slower than a link may be


def _with_a_late_rank(world: World, late: Sequence[int]) -> tuple[list[MeasuredLink], Finding]:
    """Rank 1 takes its time for these of the long messages that rank 0 sends it. Each
    measurement has two: a probe, and one that counts.
    """
    numbers, receive = itertools.count(), world.group.receive

    def slowly(tensor: torch.Tensor, source: int) -> None:
        receive(tensor, source)  # the sender's clock runs: the delay before the answer counts whole
        if (
            world.rank == 1
            and source == 0
            and tensor.dtype == torch.uint8
            and next(numbers) in late
        ):
            time.sleep(LATE)

    with mock.patch.object(world.group, "receive", slowly):
        found = links.measure(world.group, ["x", "y", "z"], world.device, hosts=True)
    return found, links.judge(found, hosts=True)


@pytest.mark.parametrize(
    ("late", "blamed"),
    [pytest.param([1], False, marks=pytest.mark.rest), ([1, 3, 5], True)],
)
def test_a_link_is_slow_that_is_slow_every_time(late: list[int], blamed: bool) -> None:
    answers = on_team(_with_a_late_rank, 3, [late])
    assert answers[0] == answers[1] == answers[2]
    found, finding = answers[0]
    [x_to_y] = [link for link in found if (link.source, link.target) == ("x", "y")]
    assert (x_to_y.bandwidth < links.SLOWEST, "x to y" in finding.fix) == (blamed, blamed)


def _with_a_broken_rank(world: World) -> list[str]:
    right = collectives.all_gather

    def broken(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        found: torch.Tensor = right(tensor, **options)
        return found + (world.rank == 1) * (torch.arange(len(found)) == 5)

    with mock.patch.object(collectives, "all_gather", broken):
        return wrong_sums(world.group, world.device, ["native"])


def test_one_wrong_element_on_one_rank_is_seen_by_all() -> None:
    assert on_team(_with_a_broken_rank, 2) == [["all_gather by native"]] * 2
    found = judge_sums(["all_gather by native"], ["native"], 2, "rank")
    assert (found.level, found.fix[:42]) == ("fix", "all_gather by native gave wrong numbers: d")
    assert judge_sums([], ["native"], 2, "rank").level == "ok"
