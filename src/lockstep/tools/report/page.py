"""`lockstep report`: what to do first, why, and the details of a run, as a page and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from lockstep.runs import PHASES, Run, Spike, Start, number, spikes, worst
from lockstep.tools.report.figures import memory, times, training
from lockstep.tools.report.html import render
from lockstep.tools.report.rank_times import Judged, RankTimes, judged, ranks
from lockstep.tools.report.verdict import Verdict

FILE = "report.html"
_MOST_MARKS = 50


def sentences(run: Run, verdict: Verdict | None) -> list[str]:
    """Return what to do first and its reasons, in sentences."""
    if verdict is not None:
        return [verdict.do_first.sentence, *verdict.reasons()]
    if run.timeline is None:
        return ["This run has no record of its steps' times (RUN/anatomy/)."]
    return ["No step was recorded yet, so there is nothing to judge."]


def page(run: Run, verdict: Verdict | None, command: str) -> str:
    """Return the report as HTML, with the verdict at the top. `command` trains the same again; it
    is empty if no command does, and then no step can be replayed either.
    """
    jumps = spikes(run.steps)
    figures = [times(_judged(run)), training(run, jumps), memory(run.timeline)]
    starts = () if run.timeline is None else run.timeline.starts
    return render(
        run=run,
        name=run.path.resolve().name,
        command=command,
        replay=f"lockstep replay {shlex.quote(str(run.path))} --step" if command else "",
        headline=_headline(run),
        do_first=None if verdict is None else verdict.do_first.sentence,
        shares=[] if verdict is None else verdict.parts(),
        reasons=sentences(run, verdict) if verdict is None else verdict.notes,
        sections=[section for section in figures if section.figures],
        marks=_marks(run, jumps),
        starts=[(start, _ended(run, start)) for start in starts],
    )


def _judged(run: Run) -> Judged | None:
    return None if run.timeline is None else judged(run.timeline.longest, run.settings)


def _marks(run: Run, jumps: Sequence[Spike]) -> dict[int, str]:
    """Return what is to be seen in a step, by step: spikes, the largest jump of the loss, and what
    was skipped.
    """
    marks = {}
    largest = worst(run.steps)
    if largest is not None and largest.jump > 0:
        marks[largest.step] = f"largest jump: {_compared(largest)}"
    for spike in jumps[:_MOST_MARKS]:
        marks[spike.step] = f"spike: {_compared(spike)}"
    skipped = [event for event in run.events if event.event == "step skipped"]
    for event in skipped[:_MOST_MARKS]:
        if event.step:
            marks[event.step] = f"skipped: {event.values.get('reason', event.line)}"
    return dict(sorted(marks.items()))


def _compared(spike: Spike) -> str:
    return f"loss {spike.loss:.4g}, median before {spike.median:.4g}"


def _ended(run: Run, start: Start) -> str:
    """Say how a start of the ranks ended."""
    missing = f"; {ranks(start.missing)} left no file" if start.missing else ""
    cut_off = [rank for rank, lane in start.lanes.items() if not lane.ended]
    if not cut_off:
        return f"normally{missing}"
    if run.state == "under way" and run.timeline and start is run.timeline.starts[-1]:
        return f"under way{missing}"
    return f"cut off: {ranks(cut_off)}{missing}"


def _headline(run: Run) -> list[tuple[str, str]]:
    """Return the facts for the top of the page: workers, epochs, steps, headline, seconds."""
    result = run.result or {}
    facts = [
        ("workers", result.get("workers", run.settings.workers)),
        ("epochs", result.get("epochs")),
        ("steps", result.get("steps", run.steps[-1].step if run.steps else None)),
    ]
    headline = result.get("headline")
    if isinstance(headline, dict):
        facts.append((str(headline.get("name")), _short(headline.get("value"))))
    if "seconds" in result:
        facts.append(("seconds", f"{number(result['seconds']):.1f}"))
    return [(name, str(value)) for name, value in facts if value is not None]


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def as_json(run: Run, verdict: Verdict | None) -> dict[str, Any]:
    """Return the report as JSON, with times in seconds a step. `ranks` has one row per rank, or on
    a mesh one per replica.
    """
    times = _judged(run)
    starts = [
        {
            "workers": start.workers,
            "from": start.step,
            "to": start.last,
            "missing": list(start.missing),
            "seconds": start.seconds,
        }
        for start in (() if run.timeline is None else run.timeline.starts)
    ]
    largest = worst(run.steps)
    return {
        "run": str(run.path),
        "state": run.state,
        "verdict": None if verdict is None else verdict.as_json(),
        "ranks": [] if times is None else list(map(_row, times.members.values())),
        "starts": starts,
        "spikes": [spike.step for spike in spikes(run.steps)],
        "worst": None if largest is None else largest.step,
        "result": run.result,
    }


def _row(times: RankTimes) -> dict[str, Any]:
    return {
        "ranks": list(times.ranks),
        "steps": times.steps,
        **{name: times.per_step(name) for name in (*PHASES, "seconds", "moving", "waits")},
        "hidden": None if times.hidden is None else times.hidden / times.steps,
        "lost": {str(number): times.waited_for(number) for number in times.lost},
        "micro_batches": times.per_step("micro_batches"),
    }
