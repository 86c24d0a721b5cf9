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

from lockstep.data.keyed import listed
from lockstep.errors import UsageError, WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.runs import Settings
from lockstep.tools.timing.output_files import counted
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
    RecordedCall,
    Seen,
)
from lockstep.tools.verify.trace import Difference, Trace, first_difference, read_again
from lockstep.tools.verify.tracing import Start, hash_seed_is_fixed, one_hash_seed, train

_KEYED = (
    "Draw from torch, numpy.random or random: they are seeded for every micro-batch and every"
    " sample"
)
_MOST_LINES = 3


def where(difference: Difference, *, exact: bool) -> str:
    """Describe what differs first."""
    one, other = (counted(count, "worker") for count in difference.workers)
    between = f"between {one} and {other}"
    if difference.kind == "start":
        return f"before the first step {difference.name} differs {between}"
    position = f"step {difference.step}"
    if difference.slot is not None and difference.ranks is not None:
        position += f", micro-batch {difference.slot} (of {_ranks(difference)})"
    return f"{position}: {_difference(difference, one, other, exact=exact)}"


def _difference(difference: Difference, one: str, other: str, *, exact: bool) -> str:
    """Describe a difference after the first step's begin, between `one` and `other`."""
    name = difference.name
    samples = difference.indices
    values = _values(difference)
    between = f"between {one} and {other}"
    match difference.kind:
        case "again":
            change = "change when they are read again after the training"
            return f"its samples {listed(samples or ())} {change}"
        case "order":
            return f"it holds different samples on {one} than on {other}"
        case "samples":
            numbers = "" if samples is None else f" ({listed(samples)})"
            return f"its samples{numbers} are not the same on {one} and on {other}"
        case "weights":
            return (
                f"{name} differs after the update {between}, though the gradients of all"
                f" micro-batches {'are equal' if exact else 'agree'}"
            )
        case "loss":
            first = f"; the first gradient that differs is that of {name}" if name else ""
            return (
                f"from the same samples and weights its loss is {values} on {one} and"
                f" {other}{first}"
            )
    norms = f" (norms {values})" if values else ""
    return f"its loss is the same, but the gradient of {name} differs{norms} {between}"


def undecided(error: str) -> str:
    """Return the explanation if no cause was found and the training does not run with exact."""
    return (
        "not found: repeating it showed no cause. The order of addition cannot be ruled out,"
        f" because the training does not run with --exact: {error.strip().splitlines()[-1]}"
    )


def why(difference: Difference, evidence: Evidence | None, *, by_hash: bool) -> str:
    """Return the likely cause. `evidence` is None if nothing could be repeated. `by_hash` says that
    the difference disappears if all processes hash text alike.
    """
    repeated = _repeated(difference)
    if by_hash:
        return (
            "the order of a set (or hash() of text): with PYTHONHASHSEED=0 in all processes"
            f" {repeated} gives the same result everywhere. Without it every process hashes text"
            " differently. Iterate over sorted(...) in place of the set"
        )
    if evidence is None:
        return _not_repeated(difference)
    match evidence.changed:
        case "forward":
            return (
                "a sample is edited in place: it changes after the model and the loss have used"
                " it. The batch shares memory with the dataset, so an edit changes the dataset on"
                " this rank only. Edit a clone, or return one from __getitem__ or collate"
            )
        case "again":
            twice = (
                f"{repeated} twice in one process, from the same random streams, gives two results"
            )
            return _unrepeatable(difference, evidence.seen, twice)
        case "reload":
            twice = (
                f"loading the task twice and {repeated}, from the same random streams, gives two"
                " results"
            )
            return _unrepeatable(difference, evidence.loading, twice)
        case "rank":
            return _by_rank(difference, evidence)
        case "size":
            return (
                "the result depends on the number of workers: with another number it gives another"
                f" result{_listed(_calls(evidence, SIZE))}. Divide by the weight that the loss"
                " returns, not by the world size"
            )
        case "threads":
            return (
                "the result depends on the number of intra-op threads: with fewer ranks each rank"
                f" has more of them{_listed(_calls(evidence, THREADS))}. With --exact every rank"
                " computes with one thread"
            )
    return _unexplained(difference, evidence)


def _unrepeatable(difference: Difference, seen: Seen, twice: str) -> str:
    """Explain why two repetitions in one process gave different results. `twice` says what was
    repeated, `seen` what it called meanwhile.
    """
    clock = seen.of(CLOCK)
    drawn = seen.of(ENTROPY) or seen.of(OWN)
    seeds = seen.of(SEED)
    if clock:
        seeded = f", and seeds by it: {_lines(seeds)}" if seeds else ""
        return (
            f"a time-based seed or value: {twice}, and it reads the clock: {_lines(clock)}{seeded}."
            f" {_KEYED}"
        )
    if drawn or seen.moved:
        generators = _lines(drawn)
        if not drawn:
            generators = f"a {' and a '.join(seen.moved)} of the task's own"
        return (
            f"randomness outside the keyed streams: {twice}, and it draws from {generators}."
            f" {_KEYED}"
        )
    if seeds:
        return (
            f"randomness outside the keyed streams: {twice}, and it seeds a generator by itself:"
            f" {_lines(seeds)}. {_KEYED}"
        )
    if difference.kind in ("samples", "again"):
        return (
            f"a sample is edited in place: {twice}, and no random number is drawn. __getitem__ (or"
            " collate) changes what the dataset keeps, as `x -= x.mean()` does: edit a clone"
        )
    if difference.kind == "gradient":
        return (
            f"a nondeterministic operation in the backward: {twice}. --exact has torch raise an"
            " error that names it"
        )
    return (
        f"a value is kept from one call to the next: {twice}, and no random number is drawn"
        " outside the keyed streams. Look for a counter, a cache, or a tensor edited in place; or"
        " for a nondeterministic operation"
    )


def _by_rank(difference: Difference, evidence: Evidence) -> str:
    seeds = evidence.seen.of(SEED)
    if difference.kind in ("samples", "again"):
        cause = (
            "the dataset depends on the rank: when this process acts as another rank, it reads"
            " other samples"
        )
        fix = "The Loader divides the samples among the ranks: do not use the rank"
    elif seeds:
        cause = (
            "randomness is seeded by the rank: when this process acts as another rank, it gets"
            " another result"
        )
        fix = "Remove that: Lockstep already seeds the random streams of every micro-batch"
    else:
        cause = (
            "the result depends on the rank: when this process acts as another rank, it gets"
            " another one"
        )
        fix = "The result of a micro-batch must not depend on its rank: do not use the rank"
    return f"{cause}{_listed(_calls(evidence, RANK) + seeds)}. {fix}"


def _unexplained(difference: Difference, evidence: Evidence) -> str:
    again = (
        f"{_repeated(difference)} again gives the same result, also as another rank and with another"
        " number of workers"
    )
    process = _calls(evidence, PROCESS)
    if process:
        return f"a value that differs between processes: {_lines(process)}; {again}"
    states = ""
    if difference.reseeded:
        states = f"; the states of {' and '.join(difference.reseeded)} differ after the loss"
    return (
        f"not found: {again}{states}. The remaining cause is state that earlier steps, or other"
        " micro-batches of its rank, have changed"
    )


def _not_repeated(difference: Difference) -> str:
    if difference.kind == "order":
        return (
            "the data order: order= gives a different order in every process. It must depend on"
            " its own seed and the epoch only"
        )
    if difference.kind == "weights":
        return (
            "the optimizer, or a buffer: check whether it draws random numbers or uses its rank."
            " With --exact the sum has one order, so if neither does, this is a bug of Lockstep"
        )
    return (
        "the data order: a stream must yield the same samples in every process, whatever its rank;"
        " Lockstep divides them"
    )


def _listed(calls: list[RecordedCall]) -> str:
    return f": {_lines(calls)}" if calls else ""


def _calls(evidence: Evidence, kind: str) -> list[RecordedCall]:
    return [*evidence.seen.of(kind), *evidence.loading.of(kind)]


def _repeated(difference: Difference) -> str:
    """Name the work that the experiments repeat."""
    if difference.kind == "start":
        return "building the model"
    if difference.kind in ("samples", "again"):
        return "reading these samples"
    return "running this micro-batch"


def _lines(calls: list[RecordedCall]) -> str:
    return " and ".join(map(str, calls[:_MOST_LINES]))


def _values(difference: Difference) -> str:
    return " and ".join(f"{value:.9g}" for value in difference.values) if difference.values else ""


def _ranks(difference: Difference) -> str:
    assert difference.ranks is not None
    (one, other), (few, many) = difference.ranks, difference.workers
    if difference.kind == "again":
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
        first = None
        if self.difference is not None:
            sentences = {"sentence": self.where, "cause": self.why}
            first = _position(self.difference) | sentences
        amplified = []
        for difference in self.amplified:
            sentence = where(difference, exact=False)
            amplified.append(_position(difference) | {"sentence": sentence})
        return {
            "exact": self.exact,
            "same": first is None,
            "trainings": [asdict(row) for row in self.rows],
            "difference": first,
            "samples_with_equal_noise": self.equal_noise and list(self.equal_noise),
            "amplified_rounding": amplified,
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
    differences = [first_difference(traces[0], trace, exact=settings.exact) for trace in traces]
    edited = next(filter(None, map(read_again, traces)), None)
    if edited is not None or any(differences):
        say("found a difference: repeating what came before it, to find the cause")
    amplified: list[Difference] = []
    blamed: Blamed | None = None
    for difference in filter(None, differences):
        blamed = judge.blame(difference)
        if blamed is not None:
            break
        amplified.append(difference)
    if blamed is None and edited is not None:
        blamed = judge.blame(edited)
    rows = []
    for count, trace, first in zip(counts, traces, differences, strict=True):
        same = first is None or first in amplified
        rows.append(TrainedRow(count, len(trace.steps), trace.steps[-1].loss, trace.sha256, same))
    blamed_difference, sentence, cause = blamed or (None, None, None)
    return Verified(
        settings.exact,
        rows,
        blamed_difference,
        sentence,
        cause,
        tuple(amplified),
        next((trace.equal_noise for trace in traces if trace.equal_noise), None),
    )


Blamed = tuple[Difference, str, str]
"""A difference that is more than rounding, with a sentence for its place and one for its cause."""


class _Judge:
    """Trains, and finds the cause of differences between trainings."""

    def __init__(self, settings: Settings, start: Start) -> None:
        self._settings = settings
        self._start = start
        self._traces: dict[tuple[int, bool], Trace] = {}

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
        sentence = where(difference, exact=exact)
        may_be_rounding = difference.kind in ("loss", "gradient", "weights") and not exact
        if not unexplained or not may_be_rounding:
            by_hash = False
            if unexplained and not hash_seed_is_fixed():
                by_hash = self._ends_with_one_hash_seed(difference)
            return difference, sentence, why(difference, evidence, by_hash=by_hash)
        try:
            exact_difference = self._exact_judge.first_difference(difference.workers)
        except (UsageError, WorkerFailed) as error:
            return difference, sentence, undecided(str(error))
        blamed = None
        if exact_difference is not None:
            blamed = self._exact_judge.blame(exact_difference)
        if blamed is None:
            return None
        first, sentence, cause = blamed
        return first, f"with --exact, which excludes rounding, {sentence}", cause

    @cached_property
    def _exact_judge(self) -> _Judge:
        return _Judge(replace(self._settings, exact=True), self._start)

    def first_difference(self, workers: tuple[int, int]) -> Difference | None:
        """Return the first difference between two trainings, whose traces are kept. In the second
        one each rank has its own hash seed.
        """
        one = self._trace(workers[0], own_hash_seeds=False)
        other = self._trace(workers[1], own_hash_seeds=True)
        return first_difference(one, other, exact=self._settings.exact)

    def _trace(self, workers: int, *, own_hash_seeds: bool) -> Trace:
        key = (workers, own_hash_seeds)
        if key not in self._traces:
            self._traces[key] = self.trained(workers, own_hash_seeds)
        return self._traces[key]

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
        remaining = first_difference(one, other, exact=self._settings.exact)
        return remaining is None or remaining.position != difference.position


def _position(difference: Difference) -> dict[str, Any]:
    return {
        "kind": difference.kind,
        "step": difference.step,
        "slot": difference.slot,
        "name": difference.name,
        "workers": list(difference.workers),
    }
