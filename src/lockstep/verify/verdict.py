"""`lockstep verify TASK`: one training after the other, each compared with the first, and the first difference explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.settings import Settings
from lockstep.verify.causes import where, why
from lockstep.verify.compare import Difference, first_difference, read_again
from lockstep.verify.experiments import experiment
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

    def as_json(self) -> dict[str, Any]:
        found = self.difference
        rows = [{"workers": row.workers, "steps": row.steps, "loss": row.loss, "sha256": row.sha256, "same": row.same} for row in self.rows]
        first = None
        if found is not None:
            first = {"kind": found.kind, "step": found.step, "slot": found.slot, "name": found.name, "workers": list(found.workers)}
            first |= {"sentence": self.where, "cause": self.why}
        return {"exact": self.exact, "same": found is None, "trainings": rows, "difference": first}


def verify(settings: Settings, counts: Sequence[int], say: Callable[[str], None]) -> Verdict:
    """Train `settings.steps` steps at each count. `settings.exact` asks for equal bits, else for values within the tolerance.

    `say` is told what goes on. Raises WorkerFailed where a rank fails.
    """
    exact = settings.exact
    rows: list[Row] = []
    first: Trace | None = None
    differences: list[Difference] = []
    edited: list[Difference] = []
    for count in counts:
        trace = train(replace(settings, workers=count))
        first = first or trace
        found = first_difference(first, trace, exact=exact)
        differences += [found] if found else []
        edited += [found_again] if (found_again := read_again(trace)) else []
        rows.append(Row(workers=count, steps=len(trace.steps), loss=trace.steps[-1].loss, sha256=trace.sha256, same=found is None))
    difference = next(iter([*differences, *edited]), None)
    if difference is None:
        return Verdict(exact=exact, rows=rows)
    say("a difference: what came before it is run again, to see why")
    return Verdict(
        exact=exact, rows=rows, difference=difference, where=where(difference, exact=exact), why=_cause(settings, difference, exact=exact)
    )


def _cause(settings: Settings, difference: Difference, *, exact: bool) -> str:
    repeatable = difference.kind in ("start", "loss", "gradient") or (difference.indices is not None and difference.kind != "order")
    evidence = experiment(settings, difference, exact=exact) if repeatable else None
    by_hash = (
        (evidence is None or evidence.silent) and not hash_seed_is_fixed() and _ends_with_one_hash_seed(settings, difference, exact=exact)
    )
    return why(difference, evidence, exact=exact, by_hash=by_hash)


def _ends_with_one_hash_seed(settings: Settings, difference: Difference, *, exact: bool) -> bool:
    """Whether the difference is gone where all processes hash alike."""
    with one_hash_seed():
        one, other = (train(replace(settings, workers=count)) for count in difference.workers)
    found = first_difference(one, other, exact=exact)
    return found is None or (found.step, found.slot, found.kind) != (difference.step, difference.slot, difference.kind)
