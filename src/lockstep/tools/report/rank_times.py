"""The time of each rank in the steps after the warm-up: the input of a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.runs import PHASES, Settings, Start, StepsLine

_SUMS = (*PHASES, "seconds", "moving", "waits", "micro_batches")

WARM_UP = 3
"""Lines at the start that are left out, but at most half of all: they contain first allocations,
the start of threads, cold file caches.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The times of a rank in seconds; on a mesh those of the ranks that hold one replica of the
    model, for which the others wait as for one rank.
    """

    ranks: tuple[int, ...]
    steps: int
    """The number of steps, summed over its ranks like all sums here."""
    totals: Mapping[str, float]
    """Sums by phase, and of "seconds", "moving", "waits" and "micro_batches"."""
    hidden: float | None
    """Seconds of communication behind computation; None if unknown."""
    lost: Mapping[int, float]
    """Seconds that it waited, by the rank or replica it waited for."""

    def per_step(self, name: str) -> float:
        """Return this total per step."""
        return self.totals[name] / self.steps

    def waited_for(self, number: int) -> float:
        """Return the seconds a step that it waited for rank or replica `number`."""
        return self.lost.get(number, 0.0) / self.steps

    @property
    def hidden_ms(self) -> float | None:
        """Milliseconds a step of hidden communication; None if unknown."""
        return None if self.hidden is None else 1e3 * self.hidden / self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The steps that are judged, and the times of at least one rank or replica in them."""

    start: Start
    first: int
    last: int
    members: Mapping[int, RankTimes]
    """The times by rank, or on a mesh by replica."""
    member: str
    """What a member is: "rank" or "replica"."""

    def total(self, *names: str) -> float:
        """Return the sum of these totals over all members."""
        return sum(times.totals[name] for times in self.members.values() for name in names)

    @property
    def alone(self) -> bool:
        """Whether ranks step without waiting for each other: with a parameter server, or with
        local steps.
        """
        return self.start.begin.method.startswith(("server", "local"))

    @property
    def lost_to(self) -> dict[int, float]:
        """Seconds that the others waited for each member, the largest first."""
        lost = dict.fromkeys(self.members, 0.0)
        for number, times in self.members.items():
            for awaited, seconds in times.lost.items():
                if awaited != number:
                    lost[awaited] = lost.get(awaited, 0.0) + seconds
        largest_first = sorted(lost, key=lambda number: -lost[number])
        return {number: lost[number] for number in largest_first}

    def name(self, number: int) -> str:
        """`rank 3`; on a mesh `replica 1 (ranks 2 and 3)`."""
        if self.member == "rank":
            return f"rank {number}"
        return f"replica {number} ({ranks(self.members[number].ranks)})"


def judged(start: Start, settings: Settings | None = None) -> Judged | None:
    """Return the times after the warm-up; None if no step was recorded. `settings`: of the run."""
    if not start.begin.method.startswith("server"):  # ranks of a server step independently
        start = start.common()
    mesh = None if settings is None else settings.mesh
    if mesh is not None and (mesh.only_data or mesh.size != start.workers):
        mesh = None
    replica_of = {
        rank: rank if mesh is None else mesh.at(rank).data for rank in range(start.workers)
    }
    lines: dict[int, list[StepsLine]] = {}
    members: dict[int, list[int]] = {}
    for rank, lane in start.lanes.items():
        if lane.steps:
            replica = replica_of.get(rank, rank)
            warm_up = min(WARM_UP, len(lane.steps) // 2)
            lines.setdefault(replica, []).extend(lane.steps[warm_up:])
            members.setdefault(replica, []).append(rank)
    if not lines:
        return None
    times = {}
    for number in sorted(lines):
        times[number] = _rank_times(members[number], lines[number], replica_of)
    recorded = [line for of_member in lines.values() for line in of_member]
    return Judged(
        start=start,
        first=min(line.first for line in recorded),
        last=max(line.last for line in recorded),
        members=times,
        member="rank" if mesh is None else "replica",
    )


def _rank_times(
    members: Sequence[int], lines: Iterable[StepsLine], replica_of: Mapping[int, int]
) -> RankTimes:
    """Sum the lines of one member. Waits within a replica are left out: they belong to the
    pipeline.
    """
    own = replica_of.get(members[0])
    split = len(replica_of) > len(set(replica_of.values()))
    totals = dict.fromkeys(_SUMS, 0.0)
    lost: dict[int, float] = {}
    steps = 0
    hidden: float | None = 0.0
    for line in lines:
        steps += line.count
        for name in _SUMS:
            totals[name] += line.total(name)
        for rank, seconds in line.lost.items():
            replica = replica_of.get(rank)
            if replica is not None and not (split and replica == own):
                lost[replica] = lost.get(replica, 0.0) + seconds
        if hidden is not None:
            hidden = None if line.hidden is None else hidden + line.hidden
    return RankTimes(
        ranks=tuple(members),
        steps=steps,
        totals=totals,
        lost=dict(sorted(lost.items())),
        hidden=hidden,
    )


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1 and 2`, `ranks 0, 1, 2 and 9 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers]
    if len(shown) > 4:
        shown[3:] = [f"{len(numbers) - 3} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def short(value: float | None) -> str:
    """Format a number with two digits, or as a whole one: `212`, `11`, `0.35`; None: `unknown`."""
    if value is None:
        return "unknown"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds without a unit: `212`, `11`, `0.35`."""
    return short(1e3 * seconds)
