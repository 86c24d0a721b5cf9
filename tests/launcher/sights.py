"""What a launcher sees of its ranks, made up: pages, views of them, and a clock."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.stall_report import RankSnapshot, Stall, explain
from lockstep.launcher.stalls import Watcher
from lockstep.runtime import processes, status
from lockstep.runtime.status import View
from lockstep.runtime.step_clock import PHASES
from tests import pages

SECOND = 10**9
FLOOR = 10
"""Seconds of quiet that are a stall for the watcher of `Pages`."""


def view(
    phase: str = "reduce", number: int = 7, texts: dict[int, str] | None = None, **more: Any
) -> View:
    """Return a rank's page. What it does began in the future: a stall's own seconds are named."""
    values: dict[str, Any] = {
        "waits": False,
        "step": 5,
        "ticks": 1,
        "since_ns": 2**62,
        "waited_ns": 0,
        "totals_ns": dict.fromkeys(PHASES, 0),
    }
    return View(phase=phase, number=number, collectives=texts or {}, **{**values, **more})


def sight(state: str = "S", where: str = "", **more: Any) -> RankSnapshot:
    return RankSnapshot(100, view(**more), state, where)


def plain(
    text: str = "", number: int = 0, among: tuple[int, ...] = (), **more: Any
) -> RankSnapshot:
    """Return what is seen of a rank of a plain script that waits in `text`; "": elsewhere."""
    texts = {number: text} if number and text else {}
    values = {"phase": "start", "step": 0, "plain": True, "texts": texts, **more}
    return sight(waits=bool(text), call=text, number=number, among=frozenset(among), **values)


def said(*sights: RankSnapshot) -> str:
    """Return the sentence on ranks that have been seen like this for 31 seconds."""
    stall = explain(dict(enumerate(sights)), 31)
    assert stall is not None
    message = stall.message.removeprefix("STALL 31 s: ")
    assert message != stall.message
    return message


class Pages:
    """Pages of two ranks, and a watcher with a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used = 0.0, 0.0
        self.sampled = 0
        """How often the processor seconds of all processes were read."""
        self.states = {0: "sleeping", 1: "sleeping"}
        pids = {1 << 22: 0, 1 << 23: 1}
        monkeypatch.setattr(processes, "ask_for_stack", lambda pid, file: "")
        monkeypatch.setattr(processes, "cpu_seconds", self._cpu_seconds)
        monkeypatch.setattr(processes, "state", lambda pid: self.states[pids[pid]])
        self.pids = {rank: pid for pid, rank in pids.items()}
        self.pages = [status.Page(status.file_of(folder, rank)) for rank in (0, 1)]
        self.watcher = Watcher(folder, FLOOR, lambda: self.now)

    def _cpu_seconds(self, pids: Collection[int]) -> dict[int, float]:
        self.sampled += 1
        return dict.fromkeys(pids, self.used)

    def at(self, step: int, phase: str = "forward") -> None:
        """Both ranks have come there."""
        for page in self.pages:
            pages.step(page, step)
            pages.enter(page, phase, 1)

    def after(
        self, seconds: float, working: float = 0, living: tuple[int, ...] = (0, 1)
    ) -> Stall | None:
        """Return what is said when so much time has passed, looked at in between. `working`: the
        share of a processor that each rank uses.
        """
        stall = None
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.used += working / 2
            stall = self.watcher.look({rank: self.pids[rank] for rank in living}) or stall
        return stall

    def stall(self, seconds: float, working: float = 0, living: tuple[int, ...] = (0, 1)) -> Stall:
        """Return the stall that is said within that time."""
        stall = self.after(seconds, working, living)
        assert stall is not None
        return stall
