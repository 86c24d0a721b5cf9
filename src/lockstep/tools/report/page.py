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


def told(recorded: Recorded, verdict: Verdict | None) -> list[str]:
    """Return what to do first and its reasons, in sentences."""
    if verdict is not None:
        return [verdict.do_first.sentence, *verdict.reasons()]
    return [NO_ANATOMY if recorded.anatomy is None else NO_STEP]


def page(recorded: Recorded, verdict: Verdict | None) -> str:
    """Return the report as HTML, with the verdict at the top."""
    table = Numbers("Machine, versions and numbers", ["fact", "value"], _run(recorded))
    sections = [
        by_rank.times(_judged(recorded)),
        history.curves(recorded),
        by_rank.memory(recorded.anatomy),
        history.history(recorded),
        Section("run", "The run", tables=[table]),
    ]
    began = str(recorded.start.get("at", ""))
    return render(
        task=short_name(recorded.settings.task),
        run=recorded.run.resolve().name,
        state=recorded.state,
        began=began.replace("T", " ").replace("+00:00", " UTC"),
        command=_command(recorded.settings),
        facts=_facts(recorded),
        do_first=None if verdict is None else verdict.do_first.sentence,
        shares=[] if verdict is None else verdict.parts(),
        reasons=told(recorded, verdict) if verdict is None else verdict.notes,
        sections=[section for section in sections if not section.empty],
    )


def _judged(recorded: Recorded) -> Judged | None:
    if recorded.anatomy is None:
        return None
    return judged(recorded.anatomy.longest, recorded.settings.mesh)


def _command(settings: Settings) -> str:
    """Return a command that trains the same, with the options that differ from the defaults. It is
    empty for a task that was made in Python and that the command line does not know.
    """
    if settings.task not in BUNDLED and not settings.task.endswith(".py"):
        return ""
    words = ["lockstep", "train", settings.task]
    for name, knob in knobs(Settings).items():
        value = getattr(settings, name)
        if value == knob.default or name in _INSIDE:
            continue
        flag = knob.flags[0]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        for single in value if knob.is_repeated else [value]:
            words += [flag, str(single)]
    for key, value in settings.overrides.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _facts(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the facts for the top of the page: workers, epochs, steps, headline, seconds."""
    result = recorded.result or {}
    last = recorded.steps[-1]["step"] if recorded.steps else None
    facts = [
        ("workers", result.get("workers", recorded.settings.workers)),
        ("epochs", result.get("epochs")),
        ("steps", result.get("steps", last)),
    ]
    headline = result.get("headline")
    if isinstance(headline, dict):
        facts.append((str(headline.get("name")), _short(headline.get("value"))))
    seconds = result.get("seconds")
    if isinstance(seconds, int | float):
        facts.append(("seconds", f"{number(seconds):.1f}"))
    return [(name, str(value)) for name, value in facts if value is not None]


def _run(recorded: Recorded) -> list[tuple[str, str]]:
    """Return the machine, the versions and the main numbers of the run."""
    facts: dict[str, Any] = {}
    machine = _mapping(recorded.start.get("machine"))
    versions = {**_mapping(recorded.start.get("versions")), "torch": machine.get("torch")}
    begin = None
    if recorded.anatomy is not None:
        generation = recorded.anatomy.generations[-1]
        begin = generation.begin
        hosts = dict.fromkeys(lane.begin.host for lane in generation.lanes.values())
        facts["hosts"] = f"{', '.join(hosts)} ({counted(begin.cores, 'core')} each)"
    facts["processor"] = machine.get("processor")
    facts["GPU"] = machine.get("GPU")
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    facts["versions"] = ", ".join(installed)
    if begin is not None:
        facts["threads a rank"] = begin.threads
        batch = f"{begin.global_batch} samples, micro-batches of {begin.micro_batch}"
        facts["batch"] = batch
    facts["seed"] = recorded.start.get("seed")
    facts["learning rate"] = _range(recorded, "lr")
    facts["gradient norm"] = _range(recorded, "grad_norm")
    facts["weights sha256"] = (recorded.result or {}).get("sha256")
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _range(recorded: Recorded, name: str) -> str:
    """`0.001`, or `0.0001 to 0.002, 0.0003 at the end`."""
    values = [number(record.get(name)) for record in recorded.steps]
    known = [value for value in values if not isnan(value)]
    if not known:
        return ""
    least = _short(min(known))
    most = _short(max(known))
    if least == most:
        return f"{least}"
    return f"{least} to {most}, {_short(known[-1])} at the end"


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def as_json(recorded: Recorded, verdict: Verdict | None) -> dict[str, Any]:
    """Return the report as JSON, with times in seconds a step. `ranks` has one row per rank, or on
    a mesh one per replica.
    """
    judged_run = _judged(recorded)
    generations = () if recorded.anatomy is None else recorded.anatomy.generations
    starts = [
        {
            "workers": generation.workers,
            "from": generation.step,
            "to": generation.last,
            "missing": list(generation.missing),
            "seconds": generation.seconds,
        }
        for generation in generations
    ]
    places = () if judged_run is None else judged_run.places.values()
    return {
        "run": str(recorded.run),
        "state": recorded.state,
        "verdict": None if verdict is None else verdict.as_json(),
        "ranks": [_row(times) for times in places],
        "starts": starts,
        "result": recorded.result,
    }


def _row(times: RankTimes) -> dict[str, Any]:
    return {
        "ranks": list(times.ranks),
        "steps": times.steps,
        **{name: times.per_step(name) for name in (*PHASES, "seconds", "moving", "waits")},
        "hidden": times.hidden_per_step,
        "lost": {str(number): times.waited_for(number) for number in times.lost},
        "micro_batches": times.per_step("micro_batches"),
    }
