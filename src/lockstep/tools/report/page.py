"""`lockstep report`: all sections on one page, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.tools.recorded import Recorded
from lockstep.tools.report import curves, history, inside_step, rank_figures, settings_table
from lockstep.tools.report.html import render
from lockstep.tools.report.judged import Judged, RankTimes, judged
from lockstep.tools.report.verdict import Verdict
from lockstep.training.resolve import short_name
from lockstep.training.timeline.lines import PHASES

FILE = "report.html"


def page(recorded: Recorded, sentences: Sequence[str]) -> str:
    """`sentences`: the verdict, on top."""
    found = _judged(recorded)
    sections = [
        curves.section(recorded),
        rank_figures.times(found),
        inside_step.section(recorded.anatomy),
        rank_figures.memory(recorded.anatomy),
        history.checks(recorded, found),
        history.history(recorded),
        settings_table.section(recorded),
    ]
    return render(
        task=short_name(recorded.settings.task),
        run=recorded.run.resolve().name,
        state=recorded.state,
        facts=_facts(recorded),
        sentences=sentences,
        sections=[each for each in sections if not each.empty],
    )


def _judged(recorded: Recorded) -> Judged | None:
    return (
        None
        if recorded.anatomy is None
        else judged(recorded.anatomy.longest, recorded.settings.mesh)
    )


def _facts(recorded: Recorded) -> list[tuple[str, str]]:
    """What a reader asks first."""
    result = recorded.result or {}
    last = recorded.steps[-1]["step"] if recorded.steps else None
    found = [
        ("steps", result.get("steps", last)),
        ("epochs", result.get("epochs")),
        ("workers", result.get("workers")),
    ]
    if isinstance(result.get("headline"), dict):
        value = result["headline"].get("value")
        found.append(
            (
                str(result["headline"].get("name")),
                f"{value:.4f}" if isinstance(value, float) else value,
            )
        )
    if isinstance(result.get("seconds"), int | float):
        found.append(("seconds", f"{result['seconds']:.1f}"))
    found.append(("weights", str(result["sha256"])[:16] if "sha256" in result else None))
    return [(name, str(value)) for name, value in found if value is not None]


def as_json(recorded: Recorded, verdict: Verdict | None) -> dict[str, Any]:
    """Times in seconds a step. `ranks` has a row a rank; on a mesh a row a replica."""
    found = _judged(recorded)
    starts = [
        {
            "workers": each.workers,
            "from": each.step,
            "to": each.last,
            "missing": list(each.missing),
            "seconds": each.seconds,
        }
        for each in (() if recorded.anatomy is None else recorded.anatomy.generations)
    ]
    return {
        "run": str(recorded.run),
        "state": recorded.state,
        "verdict": None if verdict is None else verdict.as_json(),
        "ranks": [] if found is None else [_row(place) for place in found.places.values()],
        "starts": starts,
        "result": recorded.result,
    }


def _row(place: RankTimes) -> dict[str, Any]:
    lost = {str(who): place.waited_for(who) for who in place.lost}
    times = {name: place.each(name) for name in (*PHASES, "seconds", "moving", "waits")}
    whole = {"hidden": place.hidden_each, "lost": lost, "micro_batches": place.pieces}
    return {"ranks": list(place.ranks), "steps": place.steps, **times, **whole}
