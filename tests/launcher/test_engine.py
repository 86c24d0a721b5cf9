"""How long a failure is let settle, until the cause of it can be told from its consequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest

from lockstep.launcher.engine import LocalRanks, Ranks
from lockstep.launcher.failures import of_exit


class Stub:
    """A server whose only rank that fails has failed, at a clock of its own: each wait is a
    tenth of a second.
    """

    def __init__(self, codes: list[int | None], states: Mapping[int, str]) -> None:
        self.of_ranks, self.states, self.seconds = codes, states, 0.0

    def fork(
        self,
        work: Callable[[], object],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        **options: object,
    ) -> int:
        return 10 + int(environment["RANK"])

    def codes(self, pids: Collection[int]) -> dict[int, int | None]:
        return {pid: self.of_ranks[pid - 10] for pid in pids}

    def wait(self, seconds: float) -> None:
        self.seconds += 0.1

    def release(self, pid: int) -> None:
        pass

    def state(self, pid: int) -> str:
        return self.states[pid]


def settling(
    monkeypatch: pytest.MonkeyPatch,
    explained: bool,
    states: Mapping[int, str],
    codes: list[int | None],
) -> float:
    """Seconds until it has settled, where rank 0 has failed."""
    server = Stub(codes, states)
    ended: list[float] = []
    monkeypatch.setattr(Ranks, "end", lambda self, grace: ended.append(server.seconds))
    place = LocalRanks(count=len(codes), size=len(codes), address="127.0.0.1", port=1)
    ranks = Ranks(server, place, lambda: 100 + server.seconds)  # type: ignore[arg-type]
    ranks.start(lambda rank, variables: (print, variables))
    known = [of_exit(1, 0, 10)] if explained else []
    found = ranks.run(failures=lambda now: known, stopping=lambda living: not living)
    assert found.codes == dict(enumerate(codes))
    return round(ended[0], 1)


def test_what_is_explained_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, True, {10: "zombie", 11: "sleeping"}, [1, None]) == 0


def test_a_complaint_waits_a_second_for_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, False, {10: "zombie", 11: "sleeping"}, [1, None]) == pytest.approx(
        1.0, abs=0.11
    )


def test_and_not_where_nobody_is_left_to_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(monkeypatch, False, {10: "zombie", 11: "zombie"}, [1, 1]) == 0


def test_and_longer_for_a_peer_that_is_dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first thread is dead, which is what the others see; a thread of it that hardly gets
    the processor is not, and the kernel waits for it.
    """
    assert settling(monkeypatch, False, {10: "zombie", 11: "zombie"}, [1, None]) == pytest.approx(
        21.0, abs=0.11
    )


def test_and_for_those_that_leave_as_they_were_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settling(
        monkeypatch, False, {10: "zombie", 11: "sleeping"}, [75, None]
    ) == pytest.approx(21.0, abs=0.11)


def test_where_all_have_ended_nobody_is_asked_whether_they_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that leave as they were asked to may do so between two looks: that is not "ended at
    once".
    """
    assert settling(monkeypatch, False, {10: "zombie", 11: "zombie"}, [75, 75]) == 0
