"""What is timed: a piece of work for each row of the table, and, for what is predicted, each row's fullest rank by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.measure.scaling.counts import Mode, busiest


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Steps of `global_batch` samples, by a team of so many ranks."""

    workers: int
    global_batch: int
    threads: int
    """Intra-op threads of a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Works:
    """Of all modes and numbers of workers."""

    batches: Mapping[Mode, Mapping[int, int]]
    """Global batches, by number of workers."""
    micro_batch: int
    threads: Mapping[int, int]
    """Of a rank, by number of workers."""

    def of(self, mode: Mode, workers: int) -> Work:
        return Work(workers=workers, global_batch=self.batches[mode][workers], threads=self.threads[workers])

    def alone(self, mode: Mode, workers: int) -> Work:
        """What the fullest of so many ranks computes, by one that has nobody to wait for. In weak scaling that is the base's own, for all."""
        whole = self.batches[mode][workers]
        most = min(whole, busiest(whole, self.micro_batch, workers) * self.micro_batch)  # a step's last micro-batch may be a small one
        return Work(workers=1, global_batch=most, threads=self.threads[workers])

    def all(self) -> list[Work]:
        """Each once: what two rows have in common is timed for both."""
        pairs = [(mode, workers) for mode, batches in self.batches.items() for workers in batches]
        return list(dict.fromkeys([*(self.of(*pair) for pair in pairs), *(self.alone(*pair) for pair in pairs)]))


def order_of_turns(works: int, rounds: int) -> list[int]:
    """Numbers of the works in the order of their turns: once each to warm up, then the rounds, every other one backwards."""
    return [number for turn in range(1 + rounds) for number in (range(works) if turn % 2 == 0 else reversed(range(works)))]


def sizes(works: Sequence[Work]) -> list[int]:
    """Of the teams that these need."""
    return sorted({work.workers for work in works})
