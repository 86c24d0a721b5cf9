"""Generations: who starts again, with how many workers, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from lockstep.launcher.failures import Failure, Kind
from lockstep.launcher.generations import Workers, run_generations
from lockstep.launcher.supervise import Outcome
from tests.refused import refused

Ending = Literal["end", "grow", "kill", "loader", "raise", "stopped"]


def outcome(ending: Ending) -> Outcome:
    if ending in ("end", "grow"):
        return Outcome(0)
    if ending == "stopped":
        return Outcome(130)
    kinds: dict[Ending, Kind] = {"kill": "signal", "loader": "loader", "raise": "exception"}
    kind = kinds[ending]
    code = 1 if ending == "raise" else 137
    return Outcome(
        code, Failure(rank=0, kind=kind, message="", code=code, pid=1, host="", monotonic_ns=0)
    )


def played(workers: Workers, restarts: int, *endings: Ending) -> tuple[list[int], int]:
    """The workers of each generation, and the exit code, where the generations end like this."""
    counts: list[int] = []
    script: Iterator[Ending] = iter(endings)
    last: list[Ending] = ["end"]

    def start(count: int) -> Outcome:
        counts.append(count)
        last[0] = next(script)
        return outcome(last[0])

    found = run_generations(start, workers, restarts, lambda: last[0] == "grow")
    assert list(script) == [], "it went on for as long as it should"
    return counts, found.exit_code


def test_a_killed_worker_is_done_without_until_the_next_checkpoint() -> None:
    assert played(Workers(1, 4), 3, "kill", "grow", "end") == ([4, 3, 4], 0)
    assert played(Workers(1, 4), 3, "kill", "kill", "end") == ([4, 3, 2], 0)
    assert played(Workers(2, 3), 3, "kill", "kill", "kill", "end") == ([3, 2, 2, 2], 0)
    assert played(Workers(1, 2), 3, "loader", "end") == ([2, 1], 0)
    assert played(Workers(2, 2), 1, "kill", "end") == ([2, 2], 0)


def test_restarts_are_counted_and_growing_is_none() -> None:
    assert played(Workers(1, 2), 2, "kill", "grow", "kill", "grow", "kill") == (
        [2, 1, 2, 1, 2],
        137,
    )
    assert played(Workers(1, 4), 0, "kill") == ([4], 137)


@pytest.mark.parametrize(("ending", "code"), [("raise", 1), ("stopped", 130), ("end", 0)])
def test_what_would_come_back_and_what_was_meant_begin_nothing(ending: Ending, code: int) -> None:
    assert played(Workers(1, 4), 3, ending) == ([4], code)


def test_workers_are_read() -> None:
    assert (Workers.read("4"), Workers.read("1:4")) == (Workers(4, 4), Workers(1, 4))
    for text in ("", "x", "1:", ":4", "4:1", "0", "0:2", "1:2:3", "-1"):
        with refused("not-a-range-of-workers", value=text):
            Workers.read(text)
