"""What a verdict is about: the steps after the warm-up, and each rank's time in them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.anatomy.generation import Generation
from lockstep.anatomy.lines import PHASES, Steps
from lockstep.mesh.layout import Mesh

WARM_UP = 3
"""Lines at the start that are left out where there are twice as many: first allocations, threads, file caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank; or, on a mesh, the ranks that hold one replica of the model: others wait for them as for one. Times in seconds."""

    ranks: tuple[int, ...]
    steps: int
    """All of its ranks' together."""
    seconds: float
    phases: Mapping[str, float]
    hidden: float | None
    """None where it is not known."""
    moving: float
    waits: float
    lost: Mapping[int, float]
    """By the place that was waited for."""
    micro_batches: int
    spread: float | None
    """Of a step's own time, without waiting: standard deviation over mean. None for less than two steps."""
    error: float
    """Seconds by which the mean of that time may be off: one standard error, 0 where nothing is known of it."""

    def each(self, phase: str) -> float:
        """Seconds a step, on average; of a phase, or of "moving", "waits", "seconds"."""
        whole = self.phases[phase] if phase in PHASES else getattr(self, phase)
        return float(whole) / self.steps

    @property
    def hidden_each(self) -> float | None:
        """Seconds a step; None where it is not known."""
        return None if self.hidden is None else self.hidden / self.steps

    @property
    def busy(self) -> float:
        """Seconds a step in which it was not waiting."""
        return (self.seconds - self.waits) / self.steps

    @property
    def computing(self) -> float:
        """Seconds a step."""
        return self.each("forward") + self.each("backward")

    @property
    def pieces(self) -> float:
        """Micro-batches a step."""
        return self.micro_batches / self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Never without a place, and no place without a step."""

    generation: Generation
    first: int
    last: int
    places: Mapping[int, Place]
    mesh: Mesh | None

    @property
    def seconds(self) -> float:
        """Of all places together."""
        return sum(place.seconds for place in self.places.values())

    @property
    def alone(self) -> bool:
        """Whether ranks step without waiting for each other: at a server, or between two meetings."""
        return _alone(self.generation)


def judged(generation: Generation, mesh: Mesh | None = None) -> Judged | None:
    """None where no step was taken. `mesh`: how the ranks stand, where they hold parts of the model."""
    if not generation.begin.method.startswith("server"):  # whose ranks take steps of their own
        generation = generation.common()
    kept = {rank: _after_warm_up(lane.steps) for rank, lane in generation.lanes.items()}
    kept = {rank: lines for rank, lines in kept.items() if lines}
    if not kept:
        return None
    split = None if mesh is None or mesh.only_data or mesh.size != generation.workers else mesh
    if split is not None:
        kept = {rank: [_of_replicas(line, split, rank) for line in lines] for rank, lines in kept.items()}
    elif not _alone(generation) and (mesh is None or mesh.only_data) and not any(line.lost for lines in kept.values() for line in lines):
        kept = _with_lost(kept)
    members: dict[int, list[int]] = {}
    for rank in kept:
        members.setdefault(rank if split is None else split.at(rank).data, []).append(rank)
    return Judged(
        generation=generation,
        first=min(lines[0].first for lines in kept.values()),
        last=max(lines[-1].last for lines in kept.values()),
        places={number: _place(tuple(ranks), [kept[rank] for rank in ranks]) for number, ranks in sorted(members.items())},
        mesh=split,
    )


def _alone(generation: Generation) -> bool:
    return generation.begin.method.startswith(("server", "local"))


def _of_replicas(line: Steps, mesh: Mesh, rank: int) -> Steps:
    """Whom it waited for as the number of their replica; waits within its own are the pipeline's."""
    lost: dict[int, float] = {}
    for who, seconds in line.lost.items():
        if who < mesh.size and (replica := mesh.at(who).data) != mesh.at(rank).data:
            lost[replica] = lost.get(replica, 0.0) + seconds
    return replace(line, lost=lost)


def _after_warm_up(lines: Sequence[Steps]) -> Sequence[Steps]:
    return lines[min(WARM_UP, len(lines) // 2) :]


def _with_lost(kept: Mapping[int, Sequence[Steps]]) -> dict[int, Sequence[Steps]]:
    """Where no rank tells whom it waited for: the last to arrive is who waited least, and the others waited for it so much longer."""
    by_rank = {rank: {(line.first, line.last): line for line in lines} for rank, lines in kept.items()}
    shared = set.intersection(*(set(lines) for lines in by_rank.values())) if len(kept) > 1 else set()
    for key in shared:
        waits = {rank: lines[key].waits for rank, lines in by_rank.items()}
        latest = min(waits, key=lambda rank: waits[rank])
        for rank, lines in by_rank.items():
            if rank != latest and waits[rank] > waits[latest]:
                lines[key] = replace(lines[key], lost={latest: waits[rank] - waits[latest]})
    return {rank: list(lines.values()) for rank, lines in by_rank.items()}


def _place(ranks: tuple[int, ...], lines_of: Sequence[Sequence[Steps]]) -> Place:
    lines = [line for each in lines_of for line in each]
    waited_for = {who for line in lines for who in line.lost}
    return Place(
        ranks=ranks,
        steps=sum(line.count for line in lines),
        phases={phase: sum(line.phases[phase] for line in lines) for phase in PHASES},
        lost={who: sum(line.lost.get(who, 0.0) for line in lines) for who in sorted(waited_for)},
        spread=_mean(found for each in lines_of if (found := _spread(each)) is not None),
        error=max(_error(each) for each in lines_of),
        seconds=sum(line.seconds for line in lines),
        hidden=None if any(line.hidden is None for line in lines) else sum(line.hidden or 0.0 for line in lines),
        moving=sum(line.moving for line in lines),
        waits=sum(line.waits for line in lines),
        micro_batches=sum(line.micro_batches for line in lines),
    )


def _spread(lines: Sequence[Steps]) -> float | None:
    """From lines of one step each, if there are any: sums over several steps vary less."""
    least = min(line.count for line in lines)
    times = [line.busy / line.count for line in lines if line.count == least]
    if len(times) < 2 or (mean := statistics.fmean(times)) == 0:
        return None
    return statistics.pstdev(times) / mean


def _error(lines: Sequence[Steps]) -> float:
    spread, least = _spread(lines), min(line.count for line in lines)
    if spread is None:
        return 0.0
    steps = sum(line.count for line in lines)
    return spread * (sum(line.busy for line in lines) / steps) / math.sqrt(steps / least)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
