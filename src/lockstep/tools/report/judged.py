"""The time of each rank in the steps after the warm-up: the input of a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lockstep.config.mesh import Mesh
from lockstep.training.timeline import PHASES, Generation, StepsLine

LinesByRank = Mapping[int, Sequence[StepsLine]]
"""The recorded lines of each rank."""
_SUMS = ("seconds", "moving", "waits", "micro_batches")

WARM_UP = 3
"""Lines at the start that are left out, but at most half of all: they contain first allocations,
the start of threads, cold file caches.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The times of a place, in seconds. A place is a rank or, on a mesh, the ranks that hold one
    replica of the model: the others wait for them as for one rank.
    """

    ranks: tuple[int, ...]
    steps: int
    """The number of steps, summed over its ranks like all sums here."""
    totals: Mapping[str, float]
    """Sums by phase, and of "seconds", "moving", "waits" and "micro_batches"."""
    hidden: float | None
    """Seconds of communication behind computation; None if unknown."""
    lost: Mapping[int, float]
    """Seconds that it waited, by the place it waited for."""

    def per_step(self, *names: str) -> float:
        """The sum of these totals, per step."""
        return sum(self.totals[name] for name in names) / self.steps

    def waited_for(self, number: int) -> float:
        """Seconds a step that it waited for place `who`."""
        return self.lost.get(number, 0.0) / self.steps

    @property
    def hidden_per_step(self) -> float | None:
        """Seconds a step of hidden communication; None if unknown."""
        return None if self.hidden is None else self.hidden / self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The steps that are judged and the times of all places. There is at least one place, and each
    place has at least one step.
    """

    generation: Generation
    first: int
    last: int
    places: Mapping[int, RankTimes]
    mesh: Mesh | None

    def total(self, *names: str) -> float:
        """The sum of these totals over all places."""
        values = []
        for times in self.places.values():
            values += [times.totals[name] for name in names]
        return sum(values)

    @property
    def seconds(self) -> float:
        """The sum of the seconds of all places, never 0."""
        return self.total("seconds") or 1.0

    @property
    def alone(self) -> bool:
        """Whether ranks step without waiting for each other: with a parameter server, or with
        local steps.
        """
        return _alone(self.generation)

    @property
    def lost_to(self) -> dict[int, float]:
        """Seconds that the others waited for each place, the largest first."""
        lost = dict.fromkeys(self.places, 0.0)
        for number, times in self.places.items():
            for awaited, seconds in times.lost.items():
                if awaited != number:
                    lost[awaited] = lost.get(awaited, 0.0) + seconds
        longest_first = sorted(lost, key=lambda number: -lost[number])
        return {number: lost[number] for number in longest_first}

    def name(self, number: int) -> str:
        """`rank 3`; on a mesh `replica 1 (ranks 2 and 3)`."""
        if self.mesh is None:
            return f"rank {number}"
        return f"replica {number} ({ranks(self.places[number].ranks)})"


def judged(generation: Generation, mesh: Mesh | None = None) -> Judged | None:
    """Return the times of all places after the warm-up; None if no step was recorded. `mesh` is the
    mesh of the ranks, if they hold parts of the model.
    """
    if not generation.begin.method.startswith("server"):  # ranks of a server step independently
        generation = generation.common()
    lines: dict[int, Sequence[StepsLine]] = {}
    for rank, lane in generation.lanes.items():
        if lane.steps:
            warm_up = min(WARM_UP, len(lane.steps) // 2)
            lines[rank] = lane.steps[warm_up:]
    if not lines:
        return None
    split = None  # the mesh, if a replica has several ranks
    if mesh is None or mesh.only_data:
        if not _alone(generation) and not _records_waits(lines):
            lines = _with_lost(lines)
    elif mesh.size == generation.workers:
        split = mesh
    members: dict[int, list[int]] = {}
    for rank in lines:
        members.setdefault(rank if split is None else split.at(rank).data, []).append(rank)
    places = {}
    for number in sorted(members):
        of_place = []
        for rank in members[number]:
            for line in lines[rank]:
                of_place.append(line if split is None else _of_replicas(line, split, rank))
        places[number] = _rank_times(tuple(members[number]), of_place)
    return Judged(
        generation=generation,
        first=min(of_rank[0].first for of_rank in lines.values()),
        last=max(of_rank[-1].last for of_rank in lines.values()),
        places=places,
        mesh=split,
    )


def _records_waits(lines: LinesByRank) -> bool:
    """Whether any rank recorded which rank it waited for."""
    return any(line.lost for line in chain(*lines.values()))


def _alone(generation: Generation) -> bool:
    return generation.begin.method.startswith(("server", "local"))


def _of_replicas(line: StepsLine, mesh: Mesh, rank: int) -> StepsLine:
    """Return the line with its waits by replica instead of by rank. Waits within the rank's own
    replica are left out: they belong to the pipeline.
    """
    lost: dict[int, float] = {}
    for awaited, seconds in line.lost.items():
        if awaited >= mesh.size:
            continue
        replica = mesh.at(awaited).data
        if replica != mesh.at(rank).data:
            lost[replica] = lost.get(replica, 0.0) + seconds
    return replace(line, lost=lost)


def _with_lost(lines: LinesByRank) -> dict[int, Sequence[StepsLine]]:
    """Estimate which rank the others waited for, if no rank recorded it. The rank that waited least
    arrived last, and the others waited for it by so much longer.
    """
    by_rank: dict[int, dict[tuple[int, int], StepsLine]] = {}
    for rank, of_rank in lines.items():
        by_rank[rank] = {line.place: line for line in of_rank}
    for steps in set.intersection(*map(set, by_rank.values())):
        waits = {rank: of_rank[steps].waits for rank, of_rank in by_rank.items()}
        shortest = min(waits.values())
        latest = min(rank for rank, seconds in waits.items() if seconds == shortest)
        for rank, seconds in waits.items():
            if seconds > shortest:
                lost = {latest: seconds - shortest}
                by_rank[rank][steps] = replace(by_rank[rank][steps], lost=lost)
    return {rank: list(of_rank.values()) for rank, of_rank in by_rank.items()}


def _rank_times(numbers: tuple[int, ...], lines: Sequence[StepsLine]) -> RankTimes:
    hidden = [line.hidden for line in lines if line.hidden is not None]
    lost: dict[int, float] = {}
    for line in lines:
        for awaited, seconds in line.lost.items():
            lost[awaited] = lost.get(awaited, 0.0) + seconds
    totals = {}
    for name in (*PHASES, *_SUMS):
        totals[name] = sum(line.total(name) for line in lines)
    return RankTimes(
        ranks=numbers,
        steps=sum(line.count for line in lines),
        totals=totals,
        lost={awaited: lost[awaited] for awaited in sorted(lost)},
        hidden=sum(hidden) if len(hidden) == len(lines) else None,
    )


def percentages(shares: Sequence[float]) -> list[int]:
    """Round shares to whole per cents that add up as the shares do. What rounding down leaves goes
    to the largest remainders.
    """
    percents = [math.floor(100 * share) for share in shares]
    left = round(100 * sum(shares)) - sum(percents)
    largest_remainder_first = sorted(
        range(len(shares)), key=lambda index: percents[index] - 100 * shares[index]
    )
    for index in largest_remainder_first[:left]:
        percents[index] += 1
    return percents


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1 and 2`, `ranks 0, 1, 2 and 9 more`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = [str(number) for number in numbers]
    if len(shown) > 4:
        shown[3:] = [f"{len(numbers) - 3} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds without a unit: `212`, `11`, `0.35`."""
    figure = 1e3 * seconds
    return f"{figure:.0f}" if seconds >= 0.00995 else f"{figure:.2g}"
