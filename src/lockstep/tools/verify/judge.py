"""`lockstep verify TASK`: train at several numbers of workers, compare each training with the
first, and explain the first difference.

The cause is the circumstance that changed the result in an experiment; the lines of code that
depend on it are shown beside it. If no experiment changed it, the explanation names the causes that
remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.config.settings import Settings
from lockstep.data.keyed import listed
from lockstep.data.windows import counted
from lockstep.errors import UsageError, WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.tools.verify.experiments import Evidence, experiment
from lockstep.tools.verify.spy import (
    CLOCK,
    ENTROPY,
    OWN,
    PROCESS,
    RANK,
    SEED,
    SIZE,
    THREADS,
    AskedFor,
    Seen,
)
from lockstep.tools.verify.trace import Difference, Trace, first_difference, read_again
from lockstep.tools.verify.tracing import Start, hash_seed_is_fixed, one_hash_seed, train

_KEYED = (
    "Draw from torch, numpy.random or random: they are seeded for every micro-batch and every"
    " sample"
)
_MOST_LINES = 3


def where(found: Difference, *, exact: bool) -> str:
    """Describe what differs first."""
    one, other = (counted(count, "worker") for count in found.workers)
    between = f"between {one} and {other}"
    if found.kind == "start":
        return f"before the first step {found.name} differs {between}"
    place = f"step {found.step}"
    if found.slot is not None and found.ranks is not None:
        place += f", micro-batch {found.slot} (of {_ran(found)})"
    values = _values(found)
    if found.kind == "again":
        what = (
            f"its samples {listed(found.indices or ())} change when they are read again after the"
            " training"
        )
    elif found.kind == "order":
        what = f"it holds different samples on {one} than on {other}"
    elif found.kind == "samples":
        numbers = f" ({listed(found.indices)})" if found.indices is not None else ""
        what = f"its samples{numbers} are not the same on {one} and on {other}"
    elif found.kind == "weights":
        what = (
            f"{found.name} differs after the update {between}, though the gradients of all"
            f" micro-batches {'are equal' if exact else 'agree'}"
        )
    elif found.kind == "loss":
        first = f"; the first gradient that differs is that of {found.name}" if found.name else ""
        what = f"from the same samples and weights its loss is {values} on {one} and {other}{first}"
    else:
        shown = f" (norms {values})" if values else ""
        what = f"its loss is the same, but the gradient of {found.name} differs{shown} {between}"
    return f"{place}: {what}"


def undecided(error: str) -> str:
    """Return the explanation if no cause was found and the training does not run with exact."""
    return (
        "not found: repeating it showed no cause. The order of addition cannot be ruled out,"
        f" because the training does not run with --exact: {error.strip().splitlines()[-1]}"
    )


def why(found: Difference, evidence: Evidence | None, *, by_hash: bool) -> str:
    """Return the likely cause. `evidence` is None if nothing could be repeated. `by_hash` says that
    the difference disappears if all processes hash text alike.
    """
    if by_hash:
        return _by_hash(found)
    if evidence is None:
        return _without(found)
    match evidence.changed:
        case "forward":
            return (
                "a sample is edited in place: it changes after the model and the loss have used"
                " it. The batch shares memory with the dataset, so an edit changes the dataset on"
                " this rank only. Edit a clone, or return one from __getitem__ or collate"
            )
        case "again":
            twice = (
                f"{_what(found)} twice in one process, from the same random streams, gives two"
                " results"
            )
            return _restless(found, evidence.seen, twice)
        case "reload":
            twice = (
                f"loading the task twice and {_what(found)}, from the same random streams, gives"
                " two results"
            )
            return _restless(found, evidence.loading, twice)
        case "rank":
            return _by_rank(found, evidence)
        case "size":
            what = (
                "the number of workers: with another number it gives another"
                f" result{_asking(evidence, SIZE)}"
            )
            return (
                f"the result depends on {what}. Divide by the weight that the loss returns, not by"
                " the world size"
            )
        case "threads":
            what = (
                "the number of intra-op threads: with fewer ranks each rank has more of"
                f" them{_asking(evidence, THREADS)}"
            )
            return f"the result depends on {what}. With --exact every rank computes with one thread"
    return _unexplained(found, evidence)


def _restless(found: Difference, seen: Seen, twice: str) -> str:
    """Explain why two repetitions in one process gave different results. `twice` says what was
    repeated, `seen` what it called meanwhile.
    """
    clock, entropy, own, seeds = (seen.of(what) for what in (CLOCK, ENTROPY, OWN, SEED))
    if clock:
        seeded = f", and seeds by it: {_lines(seeds)}" if seeds else ""
        return (
            f"a time-based seed or value: {twice}, and it reads the clock: {_lines(clock)}{seeded}."
            f" {_KEYED}"
        )
    if entropy or seen.moved or own:
        drawn = (
            _lines(entropy or own)
            if entropy or own
            else f"a {' and a '.join(seen.moved)} of the task's own"
        )
        return f"randomness outside the keyed streams: {twice}, and it draws from {drawn}. {_KEYED}"
    if seeds:
        return (
            f"randomness outside the keyed streams: {twice}, and it seeds a generator by itself:"
            f" {_lines(seeds)}. {_KEYED}"
        )
    if found.kind in ("samples", "again"):
        return (
            f"a sample is edited in place: {twice}, and no random number is drawn. __getitem__ (or"
            " collate) changes what the dataset keeps, as `x -= x.mean()` does: edit a clone"
        )
    if found.kind == "gradient":
        return (
            f"a nondeterministic operation in the backward: {twice}. --exact has torch raise an"
            " error that names it"
        )
    return (
        f"a value is kept from one call to the next: {twice}, and no random number is drawn"
        " outside the keyed streams. Look for a counter, a cache, or a tensor edited in place; or"
        " for a nondeterministic operation"
    )


def _by_rank(found: Difference, evidence: Evidence) -> str:
    seeds = evidence.seen.of(SEED)
    if found.kind in ("samples", "again"):
        what = (
            "the dataset depends on the rank: when this process acts as another rank, it reads"
            " other samples"
        )
        fix = "The Loader divides the samples among the ranks: do not use the rank"
    elif seeds:
        what = (
            "randomness is seeded by the rank: when this process acts as another rank, it gets"
            " another result"
        )
        fix = "Remove that: Lockstep already seeds the random streams of every micro-batch"
    else:
        what = (
            "the result depends on the rank: when this process acts as another rank, it gets"
            " another one"
        )
        fix = "The result of a micro-batch must not depend on its rank: do not use the rank"
    asked = _lines(_asked(evidence, RANK) + seeds)
    return f"{what}{f': {asked}' if asked else ''}. {fix}"


def _by_hash(found: Difference) -> str:
    return (
        "the order of a set (or hash() of text): with PYTHONHASHSEED=0 in all processes"
        f" {_what(found)} gives the same result everywhere. Without it every process hashes text"
        " differently. Iterate over sorted(...) in place of the set"
    )


def _unexplained(found: Difference, evidence: Evidence) -> str:
    again = (
        f"{_what(found)} again gives the same result, also as another rank and with another number"
        " of workers"
    )
    process = _asked(evidence, PROCESS)
    if process:
        return f"a value that differs between processes: {_lines(process)}; {again}"
    states = (
        f"; the states of {' and '.join(found.reseeded)} differ after the loss"
        if found.reseeded
        else ""
    )
    return (
        f"not found: {again}{states}. The remaining cause is state that earlier steps, or other"
        " micro-batches of its rank, have changed"
    )


def _without(found: Difference) -> str:
    if found.kind == "order":
        return (
            "the data order: order= gives a different order in every process. It must depend on"
            " its own seed and the epoch only"
        )
    if found.kind == "weights":
        return (
            "the optimizer, or a buffer: check whether it draws random numbers or uses its rank."
            " With --exact the sum has one order, so if neither does, this is a bug of Lockstep"
        )
    return (
        "the data order: a stream must yield the same samples in every process, whatever its rank;"
        " Lockstep divides them"
    )


def _asking(evidence: Evidence, kind: str) -> str:
    asked = _lines(_asked(evidence, kind))
    return f": {asked}" if asked else ""


def _asked(evidence: Evidence, kind: str) -> list[AskedFor]:
    return [*evidence.seen.of(kind), *evidence.loading.of(kind)]


def _what(found: Difference) -> str:
    doing = {
        "start": "building the model",
        "samples": "reading these samples",
        "again": "reading these samples",
    }
    return doing.get(found.kind, "running this micro-batch")


def _lines(calls: list[AskedFor]) -> str:
    return " and ".join(map(str, calls[:_MOST_LINES]))


def _values(found: Difference) -> str:
    return " and ".join(f"{value:.9g}" for value in found.values) if found.values else ""


def _ran(found: Difference) -> str:
    assert found.ranks is not None
    (one, other), (few, many) = found.ranks, found.workers
    if found.kind == "again":
        return f"rank {one} of {few}"
    return f"rank {one} of {few} and of rank {other} of {many}"


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """The results of one training."""

    workers: int
    steps: int
    loss: float
    """The loss of the last step."""
    sha256: str
    """The checksum of the final weights."""
    same: bool
    """Whether every step agrees with the first training, apart from amplified rounding."""


@dataclass(frozen=True, slots=True)
class Verified:
    """The results of all trainings, and the first difference between them."""

    exact: bool
    rows: Sequence[TrainedRow]
    difference: Difference | None = None
    where: str | None = None
    why: str | None = None
    amplified: Sequence[Difference] = ()
    """Differences beyond the tolerance that come from the order of addition alone: with exact, the
    trainings have the same bits.
    """
    equal_noise: tuple[int, int] | None = None
    """Two samples that get the same noise, because the data set seeds a global generator itself."""

    @property
    def correct(self) -> bool:
        """Whether neither a difference nor another mistake was found."""
        return self.difference is None and self.equal_noise is None

    def as_json(self) -> dict[str, Any]:
        first = (
            {**_place(self.difference), "sentence": self.where, "cause": self.why}
            if self.difference
            else None
        )
        return {
            "exact": self.exact,
            "same": first is None,
            "trainings": [asdict(row) for row in self.rows],
            "difference": first,
            "samples_with_equal_noise": self.equal_noise and list(self.equal_noise),
            "amplified_rounding": [
                {**_place(each), "sentence": where(each, exact=False)} for each in self.amplified
            ],
        }


def verify(
    settings: Settings,
    counts: Sequence[int],
    say: Callable[[str], None],
    start: Start = start_ranks,
) -> Verified:
    """Train `settings.steps` steps at each number of workers and compare. With `settings.exact`
    the bits must be equal, otherwise the values must agree within the tolerance.

    `say` receives progress messages. `start` runs a function on ranks, here or on other machines.
    Raises WorkerFailed if a rank fails.
    """
    judge = _Judge(settings, start)
    # In the largest of the other trainings each rank has its own hash seed.
    own_seeds = max(range(1, len(counts)), key=lambda number: counts[number])
    traces = [judge.trained(count, number == own_seeds) for number, count in enumerate(counts)]
    found = [first_difference(traces[0], trace, exact=settings.exact) for trace in traces]
    edited = next((each for trace in traces if (each := read_again(trace)) is not None), None)
    if edited is not None or any(found):
        say("found a difference: repeating what came before it, to find the cause")
    amplified: list[Difference] = []
    blamed: Blamed | None = None
    for each in filter(None, found):
        blamed = judge.blame(each)
        if blamed is not None:
            break
        amplified.append(each)
    if blamed is None and edited is not None:
        blamed = judge.blame(edited)
    rows = []
    for count, trace, other in zip(counts, traces, found, strict=True):
        same = other is None or other in amplified
        rows.append(TrainedRow(count, len(trace.steps), trace.steps[-1].loss, trace.sha256, same))
    difference, place, cause = blamed or (None, None, None)
    return Verified(
        settings.exact,
        rows,
        difference,
        place,
        cause,
        tuple(amplified),
        next((trace.equal_noise for trace in traces if trace.equal_noise), None),
    )


Blamed = tuple[Difference, str, str]
"""A difference that is more than rounding, with a sentence for its place and one for its cause."""


class _Judge:
    """Trains, and finds the cause of differences between trainings."""

    def __init__(self, settings: Settings, start: Start) -> None:
        self._settings, self._start = settings, start
        self._kept: dict[tuple[int, bool], Trace] = {}

    def trained(self, workers: int, own_hash_seeds: bool = False) -> Trace:
        settings = replace(self._settings, workers=workers)
        return train(settings, own_hash_seeds=own_hash_seeds, start=self._start)

    def blame(self, difference: Difference) -> Blamed | None:
        """Return the cause of `difference`. None means that the training only amplifies rounding
        errors, which differ with the order of addition.

        An optimizer that divides by the size of a gradient takes a full step even if the gradient
        is only a rounding error (a bias before BatchNorm). The size of the difference then tells
        nothing. With exact there is one order of addition, so a difference there has another cause.
        """
        evidence = self._experiment(difference)
        unexplained = evidence is None or evidence.changed is None
        exact = self._settings.exact
        if exact or not unexplained or difference.kind not in ("loss", "gradient", "weights"):
            by_hash = (
                unexplained
                and not hash_seed_is_fixed()
                and self._ends_with_one_hash_seed(difference)
            )
            return (
                difference,
                where(difference, exact=exact),
                why(difference, evidence, by_hash=by_hash),
            )
        try:
            found = self._exactly.first_difference(difference.workers)
        except (UsageError, WorkerFailed) as error:
            return difference, where(difference, exact=False), undecided(str(error))
        blamed = None if found is None else self._exactly.blame(found)
        if blamed is None:
            return None
        first, place, cause = blamed
        return first, f"with --exact, which excludes rounding, {place}", cause

    @cached_property
    def _exactly(self) -> _Judge:
        return _Judge(replace(self._settings, exact=True), self._start)

    def first_difference(self, workers: tuple[int, int]) -> Difference | None:
        """Return the first difference between two trainings, whose traces are kept. In the second
        one each rank has its own hash seed.
        """
        for key in zip(workers, (False, True), strict=True):
            self._kept[key] = self._kept.get(key) or self.trained(*key)
        one, other = (self._kept[key] for key in zip(workers, (False, True), strict=True))
        return first_difference(one, other, exact=self._settings.exact)

    def _experiment(self, difference: Difference) -> Evidence | None:
        """Return the evidence for `difference`; None if nothing can be repeated."""
        no_samples = difference.kind in ("samples", "again") and difference.indices is None
        if no_samples or difference.kind in ("order", "weights"):
            return None
        return experiment(self._settings, difference, start=self._start)

    def _ends_with_one_hash_seed(self, difference: Difference) -> bool:
        """Whether the difference disappears if all processes have the same hash seed."""
        with one_hash_seed():
            one, other = (self.trained(count) for count in difference.workers)
        found = first_difference(one, other, exact=self._settings.exact)
        return found is None or found.place != difference.place


def _place(found: Difference) -> dict[str, Any]:
    names = ("kind", "step", "slot", "name", "workers")
    return {name: getattr(found, name) for name in names} | {"workers": list(found.workers)}
