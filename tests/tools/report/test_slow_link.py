"""A host whose link is slow is named from the connections of all ranks, whichever way it is
slow.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lockstep.tools.report.verdict import SlowLink, slow_link, verdict
from tests.training.timeline.synthetic import BASE, anatomy, lines

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
        "exposed all-reduce, held up by rank 2's network (10 MB/s against 100 MB/s)"
        in found.sentences()[0]
    )
