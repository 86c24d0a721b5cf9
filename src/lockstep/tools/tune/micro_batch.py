"""Find the fastest micro_batch at the task's global batch, and the largest that fits. The result is
advice, never a setting.

Another micro_batch changes the training: BatchNorm sees other batches, dropout is keyed by slots,
and sums are added in another order.

Every size runs in new processes, because a process's peak of memory never falls. It first runs
alone, to measure its memory. Then it alternates with the task's own size, to measure its time:
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
from lockstep.launcher.start import FOR_TRAININGS, fork_server
from lockstep.tools.timing.machine import free_memory
from lockstep.tools.tune.search import NO_TIME, PairedTimes
from lockstep.training.opening import backend_of

_IMPORTS = ("lockstep.training.train", "lockstep.tools.tune.tune_rank")
_SMALLER, _MOST = 2, 6  # sizes
_FOR_MEMORY = 2  # steps: the second has the optimizer's state and the first one's buckets
_SHARE_OF_FREE = 0.8  # of the memory that the host reports as free
_PATIENCE = 60.0  # extra seconds for a size: processes start, models compile
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "MemoryError",
    "can't allocate memory",
    "not enough memory",
    "(SIGKILL)",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The result for one micro_batch. `comparison` is with the task's own (None for that one), and
    `memory` is a rank's peak in bytes.
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
    """Return the sizes to try, in order: the task's own, larger sizes up to one micro-batch per
    rank, then two smaller sizes.

    They divide the global batch, and are the task's own size multiplied or divided by a power of
    two. If there are no such sizes, any size that divides the global batch is tried.
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
    """Measure each size on new ranks, in about `seconds` altogether. The note of a failed size says
    why. If the task's own size fails, no other is tried.
    """
    fork_server((*FOR_TRAININGS, *_IMPORTS)).ready()  # the imports are part of the start
    ends = monotonic() + seconds
    waiting = sizes(global_batch, micro_batch, settings.workers)
    known: Size | None = None  # the largest that ran
    # Samples/s of the task's own size. The others are computed from it by their ratios, because
    # launches differ more than turns in one launch.
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
    """Say why a size is not tried in the host's memory, or return "". Memory grows at most in
    proportion to the size, and a host that runs out of memory kills processes at random.
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
    """Shorten a failed rank's report to its first line."""
    first = failure.partition("\n")[0]
    if any(sign in failure for sign in _OUT_OF_MEMORY):
        return f"out of memory ({first})"
    return first


def on_rank(settings: Settings, size: int, own: int, seconds: float, began: float) -> Size:
    """Measure a size on this rank, and return the same Size on all ranks. A UsageError counts as
    any failure here, because the user did not choose the size.
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
    """Return the fastest size, if it is faster than the task's own by more than noise, else
    None.
    """
    better = [size for size in found if size.comparison is not None and size.comparison.faster]
    return min(
        better, key=lambda size: size.comparison.ratio if size.comparison else 1.0, default=None
    )
