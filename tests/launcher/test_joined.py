"""Lines of ranks in, lines out: what is joined, in which order, and when it leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher import joined
from lockstep.launcher.joined import Joiner, Lines, spans


def test_a_line_of_all_ranks_leaves_at_once_and_is_shown_once() -> None:
    joiner = Joiner(3)
    for rank in (2, 0, 1):
        assert joiner.take(rank, "epoch 1", now=0.0) == []
    assert joiner.ready(now=0.0) == ["[0-2] epoch 1"]
    assert joiner.due() is None


def test_a_line_of_some_leaves_when_its_time_has_come() -> None:
    joiner = Joiner(8)
    for rank in (7, 3, 0, 1):
        joiner.take(rank, "warning", now=1.0)
    assert joiner.due() == pytest.approx(1.1)
    assert joiner.ready(now=1.05) == []
    assert joiner.ready(now=1.1) == ["[0-1,3,7] warning"]


def test_a_line_that_comes_after_the_window_is_shown_again() -> None:
    joiner = Joiner(2)
    joiner.take(0, "same", now=0.0)
    assert joiner.ready(now=0.2) == ["[0] same"]
    joiner.take(1, "same", now=0.2)
    assert joiner.end() == ["[1] same"]


def test_lines_around_a_different_one_are_joined_too() -> None:
    joiner = Joiner(2)
    for rank in (0, 1):
        for line in ("begin", f"I am {rank}", "end"):
            joiner.take(rank, line, now=0.0)
    assert joiner.end() == ["[0-1] begin", "[1] I am 1", "[0] I am 0", "[0-1] end"]


def test_one_rank_that_says_something_twice_has_said_it_twice() -> None:
    joiner = Joiner(2)
    for rank in (0, 0, 1):
        joiner.take(rank, "again", now=0.0)
    assert joiner.end() == ["[0-1] again", "[0] again"]


def test_ranks_that_say_the_same_in_another_order_keep_theirs() -> None:
    joiner = Joiner(2)
    for rank, line in [(0, "a"), (0, "b"), (1, "b"), (1, "a")]:
        joiner.take(rank, line, now=0.0)
    assert joiner.end() == ["[0] a", "[0-1] b", "[1] a"]


def test_colours_do_not_tell_lines_apart_and_the_first_ranks_are_shown() -> None:
    joiner = Joiner(3)
    joiner.take(1, "loss 0.1", now=0.0)
    joiner.take(0, "\x1b[31mloss 0.1\x1b[0m", now=0.0)
    assert joiner.end() == ["[0-1] \x1b[31mloss 0.1\x1b[0m"]


_Heard = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.08)), max_size=60)


@given(_Heard)
def test_whatever_comes_every_ranks_lines_come_out_in_their_order_and_in_time(heard: list[tuple[int, str, float]]) -> None:
    joiner, now, out = Joiner(4), 0.0, list[str]()
    for rank, line, pause in heard:
        now += pause
        out += joiner.ready(now)
        out += joiner.take(rank, line, now)
        due = joiner.due()
        assert due is None or now < due <= now + joined.WINDOW
    out += joiner.end()
    for rank in range(4):
        assert [_text(line) for line in out if rank in _ranks(line)] == [text for other, text, _ in heard if other == rank]


def test_a_flood_does_not_wait() -> None:
    joiner = Joiner(2)
    left = sum(len(joiner.take(0, f"line {number}", now=0.0)) for number in range(5000))
    assert 5000 - left == len(joiner.end()) == joined._MOST


def test_bytes_become_lines_whatever_the_cuts() -> None:
    text = "eins\nzwei ü\r\ndrei".encode()
    for cut in range(len(text)):
        lines = Lines()
        assert [*lines.feed(text[:cut]), *lines.feed(text[cut:]), *lines.end()] == ["eins", "zwei ü", "drei"]


@pytest.mark.parametrize("cut", range(20))
def test_of_a_bar_only_the_last_state_counts(cut: int) -> None:
    text = b"\r 10%\r 50%\r100%\nnext"
    lines = Lines()
    assert [*lines.feed(text[:cut]), *lines.feed(text[cut:]), *lines.end()] == ["100%", "next"]


def test_a_bar_that_is_redrawn_for_hours_takes_no_memory_and_an_endless_line_comes_in_pieces() -> None:
    lines = Lines()
    for number in range(1000):
        assert lines.feed(f"\r{number:06} {'#' * 500}".encode()) == []
    assert len(lines._rest) < 600
    pieces = lines.feed(b"x" * 200_000)
    assert "".join([*pieces, *lines.end()]).endswith("x" * 200_000)
    assert max(map(len, pieces)) == joined._LONGEST


def test_spans() -> None:
    assert [spans(each) for each in ([3], [0, 1, 2], [5, 0, 2, 3], [7, 6])] == ["3", "0-2", "0,2-3,5", "6-7"]


def _text(line: str) -> str:
    return line.partition("] ")[2]


def _ranks(line: str) -> set[int]:
    found: set[int] = set()
    for part in line[1 : line.index("]")].split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
