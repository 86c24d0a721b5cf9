"""How long a failure is let settle, until the cause of it can be told from its consequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest

from lockstep.launcher.engine import LocalRanks, Ranks
from lockstep.launcher.failures import of_exit
from lockstep.launcher.rank import Rank, Target


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


@pytest.mark.parametrize(
    ("explained", "states", "codes", "seconds"),
    [
        pytest.param(True, ("zombie", "sleeping"), [1, None], 0, id="what is explained is settled"),
        pytest.param(
            False, ("zombie", "sleeping"), [1, None], 1, id="a complaint waits for its cause"
        ),
        pytest.param(
            False, ("zombie", "zombie"), [1, 1], 0, id="and not where nobody is left to say it"
        ),
        # Its first thread is dead, which is what the others see; a thread of it that hardly gets
        # the processor is not, and the kernel waits for it.
        pytest.param(
            False, ("zombie", "zombie"), [1, None], 21, id="longer for a peer that is dying"
        ),
        pytest.param(
            False, ("zombie", "sleeping"), [75, None], 21, id="and for those that leave as asked"
        ),
        # They may do so between two looks: that is not "ended at once".
        pytest.param(False, ("zombie", "zombie"), [75, 75], 0, id="which all have done"),
    ],
)
def test_how_long_it_settles(
    monkeypatch: pytest.MonkeyPatch,
    explained: bool,
    states: tuple[str, str],
    codes: list[int | None],
    seconds: float,
) -> None:
    """Rank 0 has failed. A look takes a tenth of a second."""
    server = Stub(codes, {10: states[0], 11: states[1]})
    ended: list[float] = []
    monkeypatch.setattr(Ranks, "end", lambda self, grace: ended.append(server.seconds))
    place = LocalRanks(count=len(codes), size=len(codes), address="127.0.0.1", port=1)
    ranks = Ranks(server, place, lambda: 100 + server.seconds)  # type: ignore[arg-type]
    ranks.start(Rank(rank=0, work=Target(module="lockstep.program"), records=""), lambda number: {})
    known = [of_exit(1, 0, 10)] if explained else []
    result = ranks.run(failures=lambda now: known, stopping=lambda living: None)
    assert result.codes == dict(enumerate(codes))
    assert ended[0] == pytest.approx(seconds, abs=0.11)


class OneByOne(Stub):
    """All ranks run, and each wait ends with the end of the next one: no time passes."""

    def wait(self, seconds: float) -> None:
        self.of_ranks[self.of_ranks.index(None)] = 0

    def groups(self, pids: Collection[int]) -> dict[int, dict[int, str]]:
        return {}


def test_ranks_that_end_one_by_one_are_not_all_looked_at_each_time() -> None:
    """A look costs something for each rank, so N looks would cost N x N."""
    server = OneByOne([None] * 50, {})
    place = LocalRanks(count=50, size=50, address="127.0.0.1", port=1)
    ranks = Ranks(server, place, lambda: server.seconds)  # type: ignore[arg-type]
    ranks.start(Rank(rank=0, work=Target(module="lockstep.program"), records=""), lambda number: {})
    looks: list[int] = []
    ended = ranks.run(failures=lambda now: [], stopping=lambda pids: looks.append(len(pids)))
    assert not ended.living
    assert looks == [50]
