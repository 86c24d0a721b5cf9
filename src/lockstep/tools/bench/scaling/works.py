"""How much is trained at each number of workers: the same global batch (strong scaling), or one
that grows with them (weak scaling).

And what is timed for it: a piece of work for each row of the table, and, for what is predicted,
each row's fullest rank by itself. Pure: integers go in, integers and sentences come out.
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
    """`strong`, `weak`, or `both`. Raises UsageError."""
    knob.chosen("mode", mode, (*MODES, "both"))
    return tuple(known for known in MODES if mode in (known, "both"))


def check_workers(workers: Sequence[int]) -> tuple[int, ...]:
    """The numbers of workers as they are. Raises UsageError for none at all, one below 1, and
    one that is there twice.
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
    """By number of workers. The first number trains the task as it is; in weak scaling every rank
    has what its ranks have.

    Raises UsageError where weak scaling cannot give every rank the same: a rank's batch is a whole
    number of micro-batches.
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
    """Raise UsageError where a data set has not enough for one full step at some number of
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
    """Micro-batches of the rank that has most."""
    plan = Plan(samples=global_batch, global_batch=global_batch, micro_batch=micro_batch)
    return len(plan.cut(0).share(0, workers))


def ceiling(batches: Mapping[int, int], micro_batch: int, workers: int) -> float:
    """The efficiency that the cut alone allows: a step lasts as long as the rank with the most
    micro-batches needs. 1 where all have equally many.
    """
    base = next(iter(batches))
    rate, base_rate = (
        batches[count] / busiest(batches[count], micro_batch, count) for count in (workers, base)
    )
    return rate / base_rate * base / workers


def in_words(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> str:
    """What stays the same from one number of workers to the next."""
    base, batch = next(iter(batches.items()))
    what, size, then = "global batch", batch, "more workers share it"
    if mode == "weak":
        what = "batch of a rank"
        size = batch // base
        then = "the global batch grows with the workers"
    slots = counted(-(-size // micro_batch), "micro-batch", "es")
    return f"{mode} scaling: the {what} stays {size} ({slots} of {micro_batch}), {then}"


def uneven(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> list[str]:
    """A sentence for each number of workers among which the micro-batches of a step do not
    divide.
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

    def of(self, mode: Mode, workers: int) -> TimedWork:
        return TimedWork(
            workers=workers, global_batch=self.batches[mode][workers], threads=self.threads[workers]
        )

    def alone(self, mode: Mode, workers: int) -> TimedWork:
        """What the fullest of so many ranks computes, by one that has nobody to wait for. In
        weak scaling that is the base's own, for all.
        """
        whole = self.batches[mode][workers]
        # a step's last micro-batch may be a small one
        most = min(whole, busiest(whole, self.micro_batch, workers) * self.micro_batch)
        return TimedWork(workers=1, global_batch=most, threads=self.threads[workers])

    def all(self) -> list[TimedWork]:
        """Each once: what two rows have in common is timed for both."""
        pairs = [(mode, workers) for mode, batches in self.batches.items() for workers in batches]
        return list(
            dict.fromkeys(
                [*(self.of(*pair) for pair in pairs), *(self.alone(*pair) for pair in pairs)]
            )
        )


def order_of_turns(works: int, rounds: int) -> list[int]:
    """Numbers of the works in the order of their turns: once each to warm up, then the rounds,
    every other one backwards.
    """
    return [
        number
        for turn in range(1 + rounds)
        for number in (range(works) if turn % 2 == 0 else reversed(range(works)))
    ]
