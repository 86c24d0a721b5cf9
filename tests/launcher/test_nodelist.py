"""Host names as SLURM writes them, expanded; tests/launcher/slurm compares with what SLURM's own command says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.launcher.nodelist import first_host, hosts


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("a1", "a1"),
        ("n[01-03,07]", "n01 n02 n03 n07"),
        ("a1,b[2-3]", "a1 b2 b3"),
        ("b[2-3],a1", "b2 b3 a1"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("n[1-2].cluster.local,x", "n1.cluster.local n2.cluster.local x"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[9-010]", "n9 n10"),
        ("a,,b,", "a b"),
        ("a[01,1]", "a01 a1"),
        ("[1-2]", "1 2"),
    ],
)
def test_written_short_and_long(nodelist: str, expected: str) -> None:
    assert list(hosts(nodelist)) == expected.split()
    assert first_host(nodelist) == expected.split()[0]


def test_the_first_of_many_is_found_at_once() -> None:
    assert first_host("a[0-9999]b[0-9999]c[0-9999]") == "a0b0c0"


_NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
_NUMBERS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3)


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[str]]:
    """One entry, written short, and the hosts that it means."""
    text, choices = "", []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(_NAMES)
        text, choices = text + name, [*choices, [name]]
        if draw(st.booleans()):
            ranges, numbers = [], []
            for low, more, width in draw(_NUMBERS):
                written = f"{low:0{width}d}"
                ranges.append(written if more == 0 else f"{written}-{low + more}")
                numbers += [f"{number:0{len(written)}d}" for number in range(low, low + more + 1)]
            text, choices = f"{text}[{','.join(ranges)}]", [*choices, numbers]
    return text, ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(entries(), min_size=1, max_size=3))
def test_any_list(found: list[tuple[str, list[str]]]) -> None:
    nodelist = ",".join(text for text, _ in found)
    assert list(hosts(nodelist)) == [host for _, meant in found for host in meant]


@given(st.text("n1-,[] a", max_size=8))
def test_anything_is_expanded_or_refused_in_a_sentence(nodelist: str) -> None:
    message = ""
    try:
        found = list(hosts(nodelist))
    except UsageError as error:
        found, message = [], str(error)
    assert bool(found) != (repr(nodelist) in message)
    assert all(host and not set(host) & set("[], ") for host in found)


@pytest.mark.parametrize(
    ("nodelist", "message"),
    [
        ("", r"nodelist '' names no host: it is written as in n\[01-03,07\],b2"),
        ("n[1-3", r"nodelist 'n\[1-3' cannot be read from '\[1-3' on"),
        ("n[3-1]", r"nodelist 'n\[3-1\]': '3-1' is no range of numbers"),
        ("n[1,,2]", "'' is no range of numbers"),
        ("n[a-b]", "'a-b' is no range of numbers"),
        ("n1 n2", r"cannot be read from ' n2' on"),
    ],
)
def test_what_is_not_a_nodelist(nodelist: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hosts(nodelist)
