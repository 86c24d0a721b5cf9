"""The global batch at each number of workers: always the same (strong scaling), or growing with the
number of workers (weak scaling).

Also the works to time: one for each row of the table, and for its prediction the rank with the most
micro-batches alone. These functions are pure: integers in, integers and sentences out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.config import knob
from lockstep.data.windows import Plan, counted, shares
from lockstep.errors import UsageError

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


def modes_of(mode: str) -> tuple[Mode, ...]:
    """Return the modes of `strong`, `weak` or `both`. Raises UsageError for another text."""
    knob.chosen("mode", mode, (*MODES, "both"))
    return tuple(known for known in MODES if mode in (known, "both"))


def check_workers(workers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of workers unchanged. Raises UsageError if there are none, if one is below
    1, or if one is given twice.
    """
    if isinstance(workers, str) or not isinstance(workers, Sequence) or not workers:
        expected = "numbers of workers to measure, such as 1,2,4; the first is the base"
        raise UsageError("wrong-type", name="workers", value=workers, expected=expected)
    shown = f"workers={','.join(map(str, workers))}"
    for count in workers:
        with knob.within(shown):
            knob.whole("workers", count)
        if workers.count(count) > 1:
            raise UsageError("given-twice", where=shown, name=count)
    return tuple(workers)


def global_batches(
    mode: Mode, global_batch: int, micro_batch: int, workers: Sequence[int]
) -> dict[int, int]:
    """Return the global batch for each number of workers. The first number is the base, with the
    task's own global batch. In weak scaling, every rank has as many samples as a rank of the base.

    Raises UsageError if weak scaling cannot give every rank the same whole number of micro-batches.
    """
    base = workers[0]
    if mode == "strong":
        return dict.fromkeys(workers, global_batch)
    each, rest = divmod(global_batch, base * micro_batch)
    if rest or not each:
        raise UsageError(
            "weak-scaling-uneven",
            global_batch=global_batch,
            micro_batch=micro_batch,
            workers=base,
            each=global_batch / base,
        )
    return {count: each * micro_batch * count for count in workers}


def check_samples(samples: int, batches: Mapping[int, int], mode: Mode) -> None:
    """Raise UsageError if a data set has too few samples for one full step at some number of
    workers.
    """
    for workers, batch in batches.items():
        if batch > samples:
            raise UsageError(
                "step-larger-than-data",
                workers=workers,
                mode=mode,
                global_batch=batch,
                samples=samples,
            )


def busiest(global_batch: int, micro_batch: int, workers: int) -> int:
    """Return the number of micro-batches of the rank that has most."""
    plan = Plan(samples=global_batch, global_batch=global_batch, micro_batch=micro_batch)
    return len(plan.cut(0).share(0, workers))


def ceiling(batches: Mapping[int, int], micro_batch: int, workers: int) -> float:
    """Return the highest efficiency that the division into micro-batches allows: a step takes as
    long as the rank with the most of them. 1 if all ranks have the same number.
    """
    base = next(iter(batches))
    rate, base_rate = (
        batches[count] / busiest(batches[count], micro_batch, count) for count in (workers, base)
    )
    return rate / base_rate * base / workers


def in_words(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> str:
    """Describe what stays the same from one number of workers to the next."""
    base, batch = next(iter(batches.items()))
    what, size, then = "global batch", batch, "more workers share it"
    if mode == "weak":
        what = "batch of a rank"
        size = batch // base
        then = "the global batch grows with the workers"
    slots = counted(-(-size // micro_batch), "micro-batch", "es")
    return f"{mode} scaling: the {what} stays {size} ({slots} of {micro_batch}), {then}"


def uneven(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> list[str]:
    """Return a sentence for each number of workers at which an uneven division of micro-batches
    limits the efficiency.
    """
    found = []
    for workers, batch in batches.items():
        most = ceiling(batches, micro_batch, workers)
        if most < 1 - 1e-9:
            slots = -(-batch // micro_batch)
            found.append(
                f"{mode}, {counted(workers, 'worker')}: {counted(slots, 'micro-batch', 'es')} on"
                f" {shares(slots, workers)}, so efficiency cannot pass {100 * most:.0f} %"
            )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedWork:
    """Steps of `global_batch` samples on a team of `workers` ranks."""

    workers: int
    global_batch: int
    threads: int
    """Intra-op threads of a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Works:
    """The works of all modes and numbers of workers."""

    batches: Mapping[Mode, Mapping[int, int]]
    """Global batches by mode and number of workers."""
    micro_batch: int
    threads: Mapping[int, int]
    """Intra-op threads of a rank, by number of workers."""

    def of(self, mode: Mode, workers: int) -> TimedWork:
        return TimedWork(
            workers=workers, global_batch=self.batches[mode][workers], threads=self.threads[workers]
        )

    def alone(self, mode: Mode, workers: int) -> TimedWork:
        """Return the work of the rank with the most micro-batches, on one rank alone. In weak
        scaling, its samples are the same for all numbers of workers.
        """
        whole = self.batches[mode][workers]
        # the last micro-batch of a step may be smaller
        most = min(whole, busiest(whole, self.micro_batch, workers) * self.micro_batch)
        return TimedWork(workers=1, global_batch=most, threads=self.threads[workers])

    def all(self) -> list[TimedWork]:
        """Return each work once: a work that two rows share is timed for both."""
        pairs = [(mode, workers) for mode, batches in self.batches.items() for workers in batches]
        return list(
            dict.fromkeys(
                [*(self.of(*pair) for pair in pairs), *(self.alone(*pair) for pair in pairs)]
            )
        )


def order_of_turns(works: int, rounds: int) -> list[int]:
    """Return the numbers of the works in the order of their turns: one warm-up round, then the
    timed rounds; every other round is in reverse order.
    """
    return [
        number
        for turn in range(1 + rounds)
        for number in (range(works) if turn % 2 == 0 else reversed(range(works)))
    ]
