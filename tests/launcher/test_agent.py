"""How long an agent lets a failure settle, until the cause of it can be told from its consequences."""

from __future__ import annotations

import pytest

from lockstep.launcher import agent
from lockstep.launcher.agent import Ended


def settling(monkeypatch: pytest.MonkeyPatch, explained: bool, states: dict[int, str], code: int = 1) -> list[bool]:
    """Whether it has settled after 0, 0.9, 1.1, 5, 20 and 22 seconds, where rank 0 has failed and rank 1 has not ended."""
    found = agent._Agent.__new__(agent._Agent)
    found._settled_at, found._explained = None, lambda now: explained
    clock = [100.0]
    monkeypatch.setattr(agent.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(agent.processes, "state", lambda pid: states[pid])
    ended = Ended(pids={0: 10, 1: 11}, codes={0: code, 1: None})
    answers = []
    for seconds in (0, 0.9, 1.1, 5, 20, 22):
        clock[0] = 100 + seconds
        answers.append(found._settled(ended))
    return answers


def test_what_is_explained_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, True, {10: "Z", 11: "S"}) == [True] * 6


def test_a_complaint_waits_a_second_for_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, False, {10: "Z", 11: "S"}) == [False, False, True, True, True, True]


def test_and_longer_for_a_peer_that_is_dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first thread is dead, which is what the others see; a thread of it that hardly gets the processor is not, and the kernel waits for it."""
    assert settling(monkeypatch, False, {10: "Z", 11: "Z"}) == [False, False, False, False, False, True]


def test_and_for_those_that_leave_as_they_were_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, False, {10: "Z", 11: "S"}, code=75) == [False, False, False, False, False, True]


def test_where_all_have_ended_nobody_is_asked_whether_they_must() -> None:
    """Ranks that leave as they were asked to may do so between two looks: that is not "ended at once"."""
    ended = agent.run_generation(
        ["-c", "raise SystemExit(75)"],
        2,
        environment={},
        explained=lambda now: None not in now.codes.values(),
        stopping=lambda living: not living,
    )
    assert ended.codes == {0: 75, 1: 75}
