"""`lockstep verify TASK`: one training after the other, each compared with the first, and the
first difference explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.config.settings import Settings
from lockstep.errors import UsageError, WorkerFailed
from lockstep.launcher.launch import start_ranks
from lockstep.tools.verify.causes import undecided, where, why
from lockstep.tools.verify.compare import Difference, first_difference, read_again
from lockstep.tools.verify.experiments import Evidence, experiment
from lockstep.tools.verify.trace import Trace
from lockstep.tools.verify.tracing import Start, hash_seed_is_fixed, one_hash_seed, train


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """One training."""

    workers: int
    steps: int
    loss: float
    """Of the last step."""
    sha256: str
    """Of the weights."""
    same: bool
    """As the first training, step by step."""


@dataclass(frozen=True, slots=True)
class Verified:
    """All of them."""

    exact: bool
    rows: Sequence[TrainedRow]
    difference: Difference | None = None
    where: str | None = None
    why: str | None = None
    amplified: Sequence[Difference] = ()
    """Differences beyond the tolerance that the order of addition alone makes: trained with
    exact, the same bits.
    """

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
    """Train `settings.steps` steps at each count. `settings.exact` asks for equal bits, else for
    values within the tolerance.

    `say` is told what goes on. `start` has ranks call a function, here or on other machines. Raises
    WorkerFailed where a rank fails.
    """
    judge = _Judge(settings, start)
    # In one of them ranks share no order of text.
    own_seeds = max(range(1, len(counts)), key=lambda number: counts[number])
    traces = [judge.trained(count, number == own_seeds) for number, count in enumerate(counts)]
    found = [first_difference(traces[0], trace, exact=settings.exact) for trace in traces]
    edited = next((each for trace in traces if (each := read_again(trace)) is not None), None)
    if edited is not None or any(found):
        say("a difference: what came before it is run again, to see why")
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
    return Verified(settings.exact, rows, difference, place, cause, tuple(amplified))


Blamed = tuple[Difference, str, str]
"""A difference that is more than rounding; where it is and why, in sentences."""


class _Judge:
    """Trains, and finds out why trainings differ."""

    def __init__(self, settings: Settings, start: Start) -> None:
        self._settings, self._start = settings, start
        self._kept: dict[tuple[int, bool], Trace] = {}

    def trained(self, workers: int, own_hash_seeds: bool = False) -> Trace:
        settings = replace(self._settings, workers=workers)
        return train(settings, own_hash_seeds=own_hash_seeds, start=self._start)

    def blame(self, difference: Difference) -> Blamed | None:
        """The cause of `difference`. None: the order of addition alone, whose rounding errors the
        training amplifies.

        An optimizer that divides by the size of a gradient makes a whole step of one that is
        rounding error (a bias before BatchNorm). How far values are apart then tells nothing. With
        exact there is one order of addition; what differs then too has another cause.
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
        return first, f"with exact, which leaves no rounding, {place}", cause

    @cached_property
    def _exactly(self) -> _Judge:
        return _Judge(replace(self._settings, exact=True), self._start)

    def first_difference(self, workers: tuple[int, int]) -> Difference | None:
        """Between two trainings, which are kept; in the second each rank has a hash seed of its
        own.
        """
        for key in zip(workers, (False, True), strict=True):
            self._kept[key] = self._kept.get(key) or self.trained(*key)
        one, other = (self._kept[key] for key in zip(workers, (False, True), strict=True))
        return first_difference(one, other, exact=self._settings.exact)

    def _experiment(self, difference: Difference) -> Evidence | None:
        """None where there is nothing to repeat."""
        no_samples = difference.kind in ("samples", "again") and difference.indices is None
        if no_samples or difference.kind in ("order", "weights"):
            return None
        return experiment(self._settings, difference, start=self._start)

    def _ends_with_one_hash_seed(self, difference: Difference) -> bool:
        """Whether the difference is gone where all processes hash alike."""
        with one_hash_seed():
            one, other = (self.trained(count) for count in difference.workers)
        found = first_difference(one, other, exact=self._settings.exact)
        return found is None or found.place != difference.place


def _place(found: Difference) -> dict[str, Any]:
    names = ("kind", "step", "slot", "name", "workers")
    return {name: getattr(found, name) for name in names} | {"workers": list(found.workers)}
