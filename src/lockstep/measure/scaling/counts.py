"""How much is trained at each number of workers: the same global batch (strong scaling), or one that grows with them (weak scaling).

Pure: integers go in, integers and sentences come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lockstep.data.windows import Plan, counted, shares
from lockstep.errors import UsageError

Mode = Literal["strong", "weak"]
MODES: tuple[Mode, ...] = ("strong", "weak")


def modes_of(mode: str) -> tuple[Mode, ...]:
    """`strong`, `weak`, or `both`. Raises UsageError."""
    if mode == "both":
        return MODES
    for known in MODES:
        if mode == known:
            return (known,)
    raise UsageError(f"mode={mode!r} is unknown: choose one of strong, weak, both")


def check_workers(workers: Sequence[int]) -> tuple[int, ...]:
    """The numbers of workers as they are. Raises UsageError for none at all, one below 1, and one that is there twice."""
    if isinstance(workers, str) or not isinstance(workers, Sequence):
        raise UsageError(f"workers={workers!r}: give a list of numbers of workers, such as [1, 2, 4]")
    found = tuple(workers)
    shown = ",".join(map(str, found))
    if not found:
        raise UsageError(
            "workers is empty: give the numbers of workers to measure, such as 1,2,4; the first is what others are compared with"
        )
    for count in found:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"workers={shown}: {count!r} is no number of workers; give whole numbers of at least 1, such as 1,2,4")
        if found.count(count) > 1:
            raise UsageError(f"workers={shown}: {count} is there twice; give each number once")
    return found


def global_batches(mode: Mode, global_batch: int, micro_batch: int, workers: Sequence[int]) -> dict[int, int]:
    """By number of workers. The first number trains the task as it is; in weak scaling every rank has what its ranks have.

    Raises UsageError where weak scaling cannot give every rank the same: a rank's batch is a whole number of micro-batches.
    """
    base = workers[0]
    if mode == "strong":
        return dict.fromkeys(workers, global_batch)
    each, rest = divmod(global_batch, base * micro_batch)
    if rest or not each:
        raise UsageError(
            f"weak scaling with global_batch={global_batch}, micro_batch={micro_batch} from {counted(base, 'worker')} on: a rank's batch would be "
            f"{global_batch / base:g} samples, which is no whole number of micro-batches; change one of the three, or measure strong scaling"
        )
    return {count: each * micro_batch * count for count in workers}


def check_samples(samples: int, batches: Mapping[int, int], mode: Mode) -> None:
    """Raise UsageError where a data set has not enough for one full step at some number of workers."""
    for workers, batch in batches.items():
        if batch > samples:
            raise UsageError(
                f"workers={workers} in {mode} scaling: a step takes global_batch={batch} samples and the data set has {samples}, so that no step "
                "would be full; give fewer workers, a smaller global_batch or more data"
            )


def busiest(global_batch: int, micro_batch: int, workers: int) -> int:
    """Micro-batches of the rank that has most."""
    plan = Plan(samples=global_batch, global_batch=global_batch, micro_batch=micro_batch)
    return len(plan.cut(0).share(0, workers))


def ceiling(batches: Mapping[int, int], micro_batch: int, workers: int) -> float:
    """The efficiency that the cut alone allows: a step lasts as long as the rank with the most micro-batches needs. 1 where all have equally many."""
    base = next(iter(batches))
    speedup = (batches[workers] / busiest(batches[workers], micro_batch, workers)) / (
        batches[base] / busiest(batches[base], micro_batch, base)
    )
    return speedup * base / workers


def in_words(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> str:
    """What stays the same from one number of workers to the next."""
    base = next(iter(batches))
    batch = batches[base]
    if mode == "strong":
        slots = -(-batch // micro_batch)
        return f"strong scaling: the global batch stays {batch} ({counted(slots, 'micro-batch', 'es')} of {micro_batch}), more workers share it"
    return (
        f"weak scaling: the batch of a rank stays {batch // base} ({counted(batch // base // micro_batch, 'micro-batch', 'es')} of {micro_batch}), "
        "the global batch grows with the workers"
    )


def uneven(mode: Mode, batches: Mapping[int, int], micro_batch: int) -> list[str]:
    """A sentence for each number of workers among which the micro-batches of a step do not divide."""
    found = []
    for workers, batch in batches.items():
        most = ceiling(batches, micro_batch, workers)
        if most < 1 - 1e-9:
            slots = -(-batch // micro_batch)
            found.append(
                f"{mode}, {counted(workers, 'worker')}: {counted(slots, 'micro-batch', 'es')} on {shares(slots, workers)}, "
                f"so efficiency cannot pass {100 * most:.0f} %"
            )
    return found
