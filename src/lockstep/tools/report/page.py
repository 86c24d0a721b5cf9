"""`lockstep report`: what to do first, why, and the details of a run, as a page and as JSON."""

from __future__ import annotations

import shlex
from math import isnan
from typing import Any

from lockstep.config.knob import knobs
from lockstep.config.settings import Settings
from lockstep.data.windows import counted
from lockstep.tools.recorded import Recorded, number
from lockstep.tools.report import by_rank, history
from lockstep.tools.report.html import Numbers, Section, render
from lockstep.tools.report.judged import Judged, RankTimes, judged
from lockstep.tools.report.verdict import Verdict
from lockstep.training.resolve import BUNDLED, short_name
from lockstep.training.timeline import PHASES

FILE = "report.html"
_INSIDE = ("grow", "grow_if_wanted")
"""Settings that the launcher passes to the ranks; no option sets them."""


NO_ANATOMY = "This run has no record of its steps' times (RUN/anatomy/)."
NO_STEP = "No step was recorded yet, so there is nothing to judge."


def told(recorded: Recorded, found: Verdict | None) -> list[str]:
    """Return what to do first and its reasons, in sentences."""
    if found is not None:
        return [found.do_first.sentence, *found.reasons()]
    return [NO_ANATOMY if recorded.anatomy is None else NO_STEP]


def page(recorded: Recorded, found: Verdict | None) -> str:
    """Return the report as HTML, with the verdict `found` at the top."""
    places = _judged(recorded)
    sections = [
        by_rank.times(places),
        history.curves(recorded),
        by_rank.memory(recorded.anatomy),
        history.history(recorded),
        Section(
            "run",
            "The run",
            tables=[Numbers("Machine, versions and numbers", ["fact", "value"], _run(recorded))],
        ),
    ]
    return render(
        task=short_name(recorded.settings.task),
        run=recorded.run.resolve().name,
        state=recorded.state,
        began=str(recorded.start.get("at", "")).replace("T", " ").replace("+00:00", " UTC"),
        command=_command(recorded.settings),
        facts=_facts(recorded),
        do_first=None if found is None else found.do_first.sentence,
        shares=[] if found is None else found.parts(),
        reasons=told(recorded, found) if found is None else found.notes,
        sections=[each for each in sections if not each.empty],
    )


def _judged(recorded: Recorded) -> Judged | None:
    return (
        None
        if recorded.anatomy is None
        else judged(recorded.anatomy.longest, recorded.settings.mesh)
    )


def _command(settings: Settings) -> str:
    """Return a command that trains the same, with the options that differ from the defaults. It is
    empty for a task that was made in Python and that the command line does not know.
    """
    if settings.task not in BUNDLED and not settings.task.endswith(".py"):
        return ""
    words = ["lockstep", "train", settings.task]
    for name, each in knobs(Settings).items():
        value = getattr(settings, name)
        if value == each.default or name in _INSIDE:
            continue
        values = value if each.is_repeated else [value]
        if isinstance(value, bool):
            words.append(each.flags[0] if value else each.flags[0].replace("--", "--no-", 1))
        else:
            words += [word for one in values for word in (each.flags[0], str(one))]
    for key, value in settings.overrides.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _facts(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the facts for the top of the page: workers, epochs, steps, headline, seconds."""
    result = recorded.result or {}
    last = recorded.steps[-1]["step"] if recorded.steps else None
    found = [
        ("workers", result.get("workers", recorded.settings.workers)),
        ("epochs", result.get("epochs")),
        ("steps", result.get("steps", last)),
    ]
    if isinstance(result.get("headline"), dict):
        headline = result["headline"]
        found.append((str(headline.get("name")), _short(headline.get("value"))))
    if isinstance(result.get("seconds"), int | float):
        found.append(("seconds", f"{number(result['seconds']):.1f}"))
    return [(name, str(value)) for name, value in found if value is not None]


def _run(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the machine, the versions and the main numbers of the run."""
    start, begin = recorded.start, None
    if recorded.anatomy is not None:
        lanes = recorded.anatomy.generations[-1].lanes.values()
        begin = recorded.anatomy.generations[-1].begin
        hosts = ", ".join(dict.fromkeys(lane.begin.host for lane in lanes))
    machine, versions = start.get("machine"), start.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    machine = machine if isinstance(machine, dict) else {}
    found = {
        "hosts": begin and f"{hosts} ({counted(begin.cores, 'core')} each)",
        "processor": machine.get("processor"),
        "GPU": machine.get("GPU"),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {**versions, "torch": machine.get("torch")}.items()
            if version
        ),
        "threads a rank": begin and begin.threads,
        "batch": begin and f"{begin.global_batch} samples, micro-batches of {begin.micro_batch}",
        "seed": start.get("seed"),
        "learning rate": _range(recorded, "lr"),
        "gradient norm": _range(recorded, "grad_norm"),
        "weights sha256": (recorded.result or {}).get("sha256"),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _range(recorded: Recorded, name: str) -> str:
    """`0.001`, or `0.0001 to 0.002, 0.0003 at the end`."""
    known = [value for each in recorded.steps if not isnan(value := number(each.get(name)))]
    if not known:
        return ""
    least, most = _short(min(known)), _short(max(known))
    return least if least == most else f"{least} to {most}, {_short(known[-1])} at the end"


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def as_json(recorded: Recorded, verdict: Verdict | None) -> dict[str, Any]:
    """Return the report as JSON, with times in seconds a step. `ranks` has one row per rank, or on
    a mesh one per replica.
    """
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
    whole = {
        "hidden": place.hidden_each,
        "lost": lost,
        "micro_batches": place.each("micro_batches"),
    }
    return {"ranks": list(place.ranks), "steps": place.steps, **times, **whole}
