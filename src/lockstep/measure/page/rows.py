"""`lockstep report --json`: the verdict, and each rank's mean step."""

from __future__ import annotations

from typing import Any

from lockstep.anatomy.lines import PHASES
from lockstep.measure.page.recorded import Recorded
from lockstep.measure.verdict.judged import Place, judged
from lockstep.measure.verdict.verdict import Verdict


def as_json(recorded: Recorded, verdict: Verdict | None) -> dict[str, Any]:
    """Times in seconds a step. `ranks` has a row a rank; on a mesh a row a replica."""
    anatomy = recorded.anatomy
    found = None if anatomy is None else judged(anatomy.longest, recorded.settings.grid)
    starts = [
        {"workers": each.workers, "from": each.step, "to": each.last, "missing": list(each.missing), "seconds": each.seconds}
        for each in (() if anatomy is None else anatomy.generations)
    ]
    return {
        "run": str(recorded.run),
        "state": recorded.state,
        "verdict": None if verdict is None else verdict.as_json(),
        "ranks": [] if found is None else [_row(place) for place in found.places.values()],
        "starts": starts,
        "result": recorded.result,
    }


def _row(place: Place) -> dict[str, Any]:
    times = {name: place.each(name) for name in (*PHASES, "seconds", "moving", "waits")}
    lost = {str(who): seconds / place.steps for who, seconds in place.lost.items()}
    return {
        "ranks": list(place.ranks),
        "steps": place.steps,
        **times,
        "hidden": place.hidden_each,
        "lost": lost,
        "micro_batches": place.pieces,
    }
