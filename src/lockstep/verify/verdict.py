"""`lockstep verify TASK`: one training after the other, each compared with the first, and the first difference explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.errors import UsageError, WorkerFailed
from lockstep.settings import Settings
from lockstep.verify.causes import undecided, where, why
from lockstep.verify.compare import Difference, first_difference, read_again
from lockstep.verify.experiments import Evidence, experiment
from lockstep.verify.trace import Trace
from lockstep.verify.trainings import hash_seed_is_fixed, one_hash_seed, train


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One training."""

    workers: int
    steps: int
    loss: float
    """Of the last step."""
    sha256: str
    """Of the weights."""
    same: bool
    """As the first training, step by step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All of them."""

    exact: bool
    rows: Sequence[Row]
    difference: Difference | None = None
    where: str | None = None
    why: str | None = None
    amplified: Sequence[Difference] = ()
    """Differences beyond the tolerance that the order of addition alone makes: trained with exact, the same bits."""

    def as_json(self) -> dict[str, Any]:
        found = self.difference
        rows = [{"workers": row.workers, "steps": row.steps, "loss": row.loss, "sha256": row.sha256, "same": row.same} for row in self.rows]
        first = None if found is None else {**_place(found), "sentence": self.where, "cause": self.why}
        amplified = [{**_place(each), "sentence": where(each, exact=False)} for each in self.amplified]
        return {"exact": self.exact, "same": found is None, "trainings": rows, "difference": first, "amplified_rounding": amplified}


def verify(settings: Settings, counts: Sequence[int], say: Callable[[str], None]) -> Verdict:
    """Train `settings.steps` steps at each count. `settings.exact` asks for equal bits, else for values within the tolerance.

    `say` is told what goes on. Raises WorkerFailed where a rank fails.
    """
    traces = [train(replace(settings, workers=count)) for count in counts]
    found = [first_difference(traces[0], trace, exact=settings.exact) for trace in traces]
    differences = [(number, each) for number, each in enumerate(found) if each is not None]
    edited = [each for trace in traces if (each := read_again(trace)) is not None]
    judge = _Judge(settings)
    amplified: dict[int, Difference] = {}
    blamed: Blamed | None = None
    if differences or edited:
        say("a difference: what came before it is run again, to see why")
    for number, difference in differences:
        blamed = judge.blame(difference)
        if blamed is not None:
            break
        amplified[number] = difference
    if blamed is None and edited:
        blamed = judge.blame(edited[0])
    rows = [
        Row(
            workers=count,
            steps=len(trace.steps),
            loss=trace.steps[-1].loss,
            sha256=trace.sha256,
            same=each is None or number in amplified,
        )
        for number, (count, trace, each) in enumerate(zip(counts, traces, found, strict=True))
    ]
    told: Any = {} if blamed is None else {"difference": blamed.difference, "where": blamed.where, "why": blamed.why}
    return Verdict(exact=settings.exact, rows=rows, amplified=tuple(amplified.values()), **told)


@dataclass(frozen=True, slots=True)
class Blamed:
    """A difference that is more than rounding, in sentences."""

    difference: Difference
    where: str
    why: str


class _Judge:
    """Finds out why trainings differ."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._exact: dict[int, Trace] = {}

    def blame(self, difference: Difference) -> Blamed | None:
        """The cause of `difference`. None: the order of addition alone, whose rounding errors the training amplifies.

        An optimizer that divides by the size of a gradient makes a whole step of one that is rounding error (a bias before BatchNorm). How far
        values are apart then tells nothing. With exact there is one order of addition; what differs then too has another cause.
        """
        exact = self._settings.exact
        evidence = self._experiment(difference, exact=exact)
        if not exact and difference.kind in ("loss", "gradient", "weights") and (evidence is None or evidence.silent):
            try:
                one, other = (self._trained_exactly(count) for count in difference.workers)
            except (UsageError, WorkerFailed) as error:
                return Blamed(difference, where(difference, exact=False), undecided(str(error)))
            found = first_difference(one, other, exact=True)
            if found is None:
                return None
            place = f"with exact, which leaves no rounding, {where(found, exact=True)}"
            return Blamed(found, place, self._cause(found, self._experiment(found, exact=True), exact=True))
        return Blamed(difference, where(difference, exact=exact), self._cause(difference, evidence, exact=exact))

    def _trained_exactly(self, workers: int) -> Trace:
        if workers not in self._exact:
            self._exact[workers] = train(replace(self._settings, workers=workers, exact=True))
        return self._exact[workers]

    def _experiment(self, difference: Difference, *, exact: bool) -> Evidence | None:
        repeatable = difference.kind in ("start", "loss", "gradient") or (difference.indices is not None and difference.kind != "order")
        return experiment(replace(self._settings, exact=exact), difference, exact=exact) if repeatable else None

    def _cause(self, difference: Difference, evidence: Evidence | None, *, exact: bool) -> str:
        by_hash = (
            (evidence is None or evidence.silent)
            and not hash_seed_is_fixed()
            and _ends_with_one_hash_seed(replace(self._settings, exact=exact), difference, exact=exact)
        )
        return why(difference, evidence, by_hash=by_hash)


def _place(found: Difference) -> dict[str, Any]:
    return {"kind": found.kind, "step": found.step, "slot": found.slot, "name": found.name, "workers": list(found.workers)}


def _ends_with_one_hash_seed(settings: Settings, difference: Difference, *, exact: bool) -> bool:
    """Whether the difference is gone where all processes hash alike."""
    with one_hash_seed():
        one, other = (train(replace(settings, workers=count)) for count in difference.workers)
    found = first_difference(one, other, exact=exact)
    return found is None or (found.step, found.slot, found.kind) != (difference.step, difference.slot, difference.kind)
