"""The time of each rank in the steps after the warm-up: the input of a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.config.mesh import Mesh
from lockstep.training.timeline import PHASES, Begin, Generation, StepsLine

Kept = Mapping[int, Sequence[StepsLine]]
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

    def each(self, *names: str) -> float:
        """The sum of these totals, per step."""
        return sum(self.totals[name] for name in names) / self.steps

    def waited_for(self, who: int) -> float:
        """Seconds a step that it waited for place `who`."""
        return self.lost.get(who, 0.0) / self.steps

    @property
    def hidden_each(self) -> float | None:
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

    @property
    def begin(self) -> Begin:
        return self.generation.begin

    def total(self, *names: str) -> float:
        """The sum of these totals over all places."""
        return sum(place.totals[name] for place in self.places.values() for name in names)

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
        found = dict.fromkeys(self.places, 0.0)
        for number, place in self.places.items():
            for who, seconds in place.lost.items():
                if who != number:
                    found[who] = found.get(who, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    def name(self, number: int) -> str:
        """`rank 3`; on a mesh `replica 1 (ranks 2 and 3)`."""
        return (
            f"rank {number}"
            if self.mesh is None
            else f"replica {number} ({ranks(self.places[number].ranks)})"
        )


def judged(generation: Generation, mesh: Mesh | None = None) -> Judged | None:
    """Return the times of all places after the warm-up; None if no step was recorded. `mesh` is the
    mesh of the ranks, if they hold parts of the model.
    """
    if not generation.begin.method.startswith("server"):  # ranks of a server step independently
        generation = generation.common()
    lanes = generation.lanes.items()
    kept: Kept = {
        rank: lane.steps[min(WARM_UP, len(lane.steps) // 2) :] for rank, lane in lanes if lane.steps
    }
    if not kept:
        return None
    whole = mesh is None or mesh.only_data
    split = None if whole or mesh is None or mesh.size != generation.workers else mesh
    if split is not None:
        kept = {
            rank: [_of_replicas(line, split, rank) for line in lines]
            for rank, lines in kept.items()
        }
    elif (
        whole
        and not _alone(generation)
        and not any(line.lost for lines in kept.values() for line in lines)
    ):
        kept = _with_lost(kept)
    members: dict[int, list[int]] = {}
    for rank in kept:
        members.setdefault(rank if split is None else split.at(rank).data, []).append(rank)
    places = {
        number: _rank_times(tuple(inside), [kept[rank] for rank in inside])
        for number, inside in members.items()
    }
    return Judged(
        generation=generation,
        first=min(lines[0].first for lines in kept.values()),
        last=max(lines[-1].last for lines in kept.values()),
        places=dict(sorted(places.items())),
        mesh=split,
    )


def _alone(generation: Generation) -> bool:
    return generation.begin.method.startswith(("server", "local"))


def _of_replicas(line: StepsLine, mesh: Mesh, rank: int) -> StepsLine:
    """Return the line with its waits by replica instead of by rank. Waits within the rank's own
    replica are left out: they belong to the pipeline.
    """
    lost: dict[int, float] = {}
    for who, seconds in line.lost.items():
        if who < mesh.size and (replica := mesh.at(who).data) != mesh.at(rank).data:
            lost[replica] = lost.get(replica, 0.0) + seconds
    return replace(line, lost=lost)


def _with_lost(kept: Kept) -> dict[int, Sequence[StepsLine]]:
    """Estimate which rank the others waited for, if no rank recorded it. The rank that waited least
    arrived last, and the others waited for it by so much longer.
    """
    by_rank = {rank: {line.place: line for line in lines} for rank, lines in kept.items()}
    for key in set.intersection(*map(set, by_rank.values())):
        waits = {rank: lines[key].waits for rank, lines in by_rank.items()}
        least, latest = min((time, rank) for rank, time in waits.items())
        for rank, time in waits.items():
            if time > least:
                by_rank[rank][key] = replace(by_rank[rank][key], lost={latest: time - least})
    return {rank: list(lines.values()) for rank, lines in by_rank.items()}


def _rank_times(numbers: tuple[int, ...], lines_of: Sequence[Sequence[StepsLine]]) -> RankTimes:
    lines = [line for each in lines_of for line in each]
    hidden = [line.hidden for line in lines if line.hidden is not None]
    waited_for = sorted({who for line in lines for who in line.lost})
    return RankTimes(
        ranks=numbers,
        steps=sum(line.count for line in lines),
        totals={name: sum(line.total(name) for line in lines) for name in (*PHASES, *_SUMS)},
        lost={who: sum(line.lost.get(who, 0.0) for line in lines) for who in waited_for},
        hidden=sum(hidden) if len(hidden) == len(lines) else None,
    )


def percentages(shares: Sequence[float]) -> list[int]:
    """Round shares to whole per cents that add up as the shares do. What rounding down leaves goes
    to the largest remainders.
    """
    whole = [math.floor(100 * share) for share in shares]
    left = round(100 * sum(shares)) - sum(whole)
    by_remainder = sorted(range(len(shares)), key=lambda index: whole[index] - 100 * shares[index])
    for index in by_remainder[:left]:
        whole[index] += 1
    return whole


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1 and 2`, `ranks 0, 1, 2 and 9 more`."""
    shown = [str(number) for number in numbers[:4]]
    if len(numbers) > 4:
        shown = [*shown[:3], f"{len(numbers) - 3} more"]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' * (len(numbers) > 1)} {listed}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds without a unit: `212`, `11`, `0.35`."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.00995 else f"{1e3 * seconds:.2g}"
