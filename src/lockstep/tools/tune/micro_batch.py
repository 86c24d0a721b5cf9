"""Which micro_batch is fastest at the task's global batch, and which is the largest that fits:
advice, never a setting.

Another micro_batch is another training: BatchNorm sees other batches, dropout is keyed by slots,
and sums are added in another order.

Every size has ranks of its own, since a process's high-water mark of memory never falls. In them
the size first runs alone, for its memory, then in turns with the task's own size, for its time:
machines are too noisy to compare one launch with the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from time import monotonic

from lockstep.config.settings import Settings
from lockstep.errors import LaunchTimeout, WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.server import FOR_TRAININGS, server
from lockstep.tools.timing.machine import free_memory
from lockstep.tools.tune.search import NO_TIME, PairedTimes
from lockstep.training.opening import backend_of

_IMPORTS = ("lockstep.training.train", "lockstep.tools.tune.tune_rank")
_SMALLER, _MOST = 2, 6  # sizes
_FOR_MEMORY = 2  # steps: the second has the optimizer's state and the first one's buckets
_SHARE_OF_FREE = 0.8  # of the memory that the host says is free
_PATIENCE = 60.0  # seconds beyond a size's own: processes start, models compile
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "MemoryError",
    "can't allocate memory",
    "not enough memory",
    "(SIGKILL)",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """One micro_batch, in `comparison` with the task's own (None for that itself); `memory`: the
    bytes of a rank at its peak.
    """

    micro_batch: int
    samples_per_s: float = 0.0
    memory: int = 0
    comparison: PairedTimes | None = None
    note: str = ""

    @property
    def ran(self) -> bool:
        return not self.note


def sizes(global_batch: int, micro_batch: int, workers: int) -> list[int]:
    """What to try, in that order: the task's own, larger ones up to one micro-batch a rank, then
    two smaller ones.

    Those that are the own times or through a power of two and divide the global batch; where there
    are none, any that divide it.
    """
    divisors = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    powers = [size for size in divisors if _power_of_two(size, micro_batch)]
    fitting = powers if len(powers) > (micro_batch in powers) else divisors
    larger = [size for size in fitting if micro_batch < size <= -(-global_batch // workers)]
    smaller = [size for size in fitting if size < micro_batch][-_SMALLER:]
    return [micro_batch, *larger[: _MOST - 1 - len(smaller)], *reversed(smaller)]


def _power_of_two(one: int, other: int) -> bool:
    large, small = max(one, other), min(one, other)
    times, rest = divmod(large, small)
    return rest == 0 and times.bit_count() == 1


def advise(
    settings: Settings, global_batch: int, micro_batch: int, seconds: float
) -> Iterator[Size]:
    """Measure each size on fresh ranks, in about so many seconds altogether. A size that fails
    says so; after the task's own none is tried.
    """
    server((*FOR_TRAININGS, *_IMPORTS)).ready()  # the imports are part of the start
    ends = monotonic() + seconds
    waiting = sizes(global_batch, micro_batch, settings.workers)
    known: Size | None = None  # the largest that ran
    # of the task's own, from which the others' follow by the ratio: launches differ by more than
    # turns
    rate = 0.0
    for number, size in enumerate(waiting):
        share = (ends - monotonic()) / (len(waiting) - number)
        if number and share <= 0:
            yield Size(micro_batch=size, note=f"not tried: {NO_TIME}")
            continue
        if known is not None and (note := _too_large(size, known, settings)):
            yield Size(micro_batch=size, note=note)
            continue
        found = _measure(settings, size, micro_batch, max(0.0, share))
        if found.comparison is not None:
            found = replace(found, samples_per_s=rate / found.comparison.ratio)
        rate = found.samples_per_s if not number else rate
        if found.ran and (known is None or size > known.micro_batch):
            known = found
        yield found
        if not number and not found.ran:
            return


def _too_large(size: int, known: Size, settings: Settings) -> str:
    """Why a size is not tried in the host's memory: what grows with it grows at most in
    proportion, and a host without memory kills at random.
    """
    free = None if settings.device == "cuda" else free_memory()
    needed = known.memory * max(1.0, size / known.micro_batch) * settings.workers
    if free is None or needed < _SHARE_OF_FREE * free:
        return ""
    return (
        f"not tried: {settings.workers} ranks may need {needed / 2**30:.1f} GiB, and"
        f" {free / 2**30:.1f} GiB are free"
    )


def _measure(settings: Settings, size: int, own: int, seconds: float) -> Size:
    began = monotonic()
    try:
        patience = timedelta(seconds=_PATIENCE + 3 * seconds)
        arguments = (settings, size, own, seconds, began)
        return start_ranks(
            on_rank, settings.workers, arguments, {}, timeout=patience, imports=_IMPORTS
        )[0]
    except WorkerFailed as error:
        return Size(micro_batch=size, note=why(error.sentence))
    except LaunchTimeout as error:
        return Size(micro_batch=size, note=error.sentence)


def why(failure: str) -> str:
    """A failed rank's report as a few words."""
    first = failure.partition("\n")[0]
    if any(sign in failure for sign in _OUT_OF_MEMORY):
        return f"out of memory ({first})"
    return first


def on_rank(settings: Settings, size: int, own: int, seconds: float, began: float) -> Size:
    """One rank's part: the same Size on all. A usage error is told as any other, since a size
    that cannot work is no mistake of the user's.
    """
    from lockstep.tools.timing.in_turns import Trial, largest, take_turns
    from lockstep.tools.timing.machine import Peak
    from lockstep.tools.tune.tune_rank import FEWEST, WARM_UP
    from lockstep.training.resolve import resolve
    from lockstep.world.world import init

    task = resolve(settings.task, settings.overrides)
    with init(backend=backend_of(settings.device)) as world:
        peak = Peak(world.device)
        trial = Trial(replace(task, micro_batch=size), settings, world)
        samples = [trial.step() for _ in range(_FOR_MEMORY)]
        memory = largest(int(peak.mib() * 2**20), world)
        ways = {"candidate": lambda: samples.append(trial.step())}
        if size != own:
            ways["base"] = Trial(replace(task, micro_batch=own), settings, world).step  # type: ignore[assignment]
        length = max(take_turns(ways, 2, world, warm_up=WARM_UP)["candidate"])
        left = seconds - largest(monotonic() - began, world)
        turns = max(FEWEST, min(100, int(left / (len(ways) * length))))
        found: Mapping[str, list[float]] = take_turns(ways, turns, world, warm_up=0)
        comparison = PairedTimes.of(found["base"], found["candidate"]) if "base" in found else None
        rate = sum(samples) / len(samples) / median(found["candidate"])
        return Size(micro_batch=size, samples_per_s=rate, memory=int(memory), comparison=comparison)


def fastest(found: Sequence[Size]) -> Size | None:
    """The one that is faster than the task's own by more than noise, and most so; None where
    there is none.
    """
    better = [size for size in found if size.comparison is not None and size.comparison.faster]
    return min(
        better, key=lambda size: size.comparison.ratio if size.comparison else 1.0, default=None
    )
