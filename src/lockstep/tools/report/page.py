"""`lockstep report`: all sections on one page, the settings among them; and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.tools.recorded import Recorded
from lockstep.tools.report import history, inside_step
from lockstep.tools.report.html import Numbers, Section, render
from lockstep.tools.report.judged import Judged, RankTimes, judged
from lockstep.tools.report.verdict import Verdict
from lockstep.training.resolve import short_name
from lockstep.training.timeline import PHASES, Begin
from lockstep.training.tuned import Tuned

FILE = "report.html"


def page(recorded: Recorded, sentences: Sequence[str]) -> str:
    """`sentences`: the verdict, on top."""
    found = _judged(recorded)
    sections = [
        history.curves(recorded),
        inside_step.times(found),
        inside_step.section(recorded.anatomy),
        inside_step.memory(recorded.anatomy),
        history.checks(recorded, found),
        history.history(recorded),
        settings_table(recorded),
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


_BY_TASK = ("epochs", "precision", "compile")
"""What the task decides where nobody else does."""
_INSIDE = ("grow", "grow_if_wanted", "settings_file")
"""Between launcher and ranks; nothing that was asked for."""


def settings_table(recorded: Recorded) -> Section:
    """A row a setting."""
    begin = None if recorded.anatomy is None else recorded.anatomy.generations[-1].begin
    tuned = _tuned(recorded.settings)
    used = _used(recorded, begin)
    rows = []
    for each in fields(Settings):
        if each.name not in _INSIDE:
            asked = getattr(recorded.settings, each.name)
            rows.append(
                [
                    each.name,
                    _shown(used.get(each.name, asked)),
                    _origin(each.name, recorded.settings, used, tuned),
                ]
            )
    line = recorded.start.get("line")
    text = [str(line)] if line else []
    table = Numbers(
        "Settings, what they came to, and from where", ["setting", "value", "from"], rows
    )
    return Section("settings", "Settings", text, tables=[table])


def _used(recorded: Recorded, begin: Begin | None) -> dict[str, Any]:
    """What became of settings that say "auto", or nothing."""
    found: dict[str, Any] = {}
    if recorded.settings.epochs is None and recorded.start.get("epochs") is not None:
        found["epochs"] = recorded.start["epochs"]
    if begin is not None:
        found |= {"device": begin.device, "reduce": begin.reduction, "threads": begin.threads}
    elif recorded.result is not None and "reduce" in recorded.result:
        found["reduce"] = recorded.result["reduce"]
    return found


def _origin(
    name: str, settings: Settings, used: Mapping[str, Any], tuned: Mapping[str, Any]
) -> str:
    asked, default = getattr(settings, name), _default(name)
    if asked != default or name == "task":
        return (
            f"tuned ({settings.settings_file})"
            if name in tuned and tuned[name] == asked
            else "given"
        )
    if name in _BY_TASK:
        return (
            "the task"
            if name != "epochs" or settings.steps is None
            else "not used: steps are given"
        )
    if name in used and used[name] != asked:
        return "derived here" if asked is None else f"derived here from {asked}"
    return "default"


def _default(name: str) -> Any:
    return getattr(Settings(task=""), name)


def _tuned(settings: Settings) -> Mapping[str, Any]:
    """What the file of `lockstep tune` gave, if it is still there."""
    if settings.settings_file is None:
        return {}
    try:
        return Tuned.read(Path(settings.settings_file)).settings
    except UsageError:
        return {}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={each}" for key, each in value.items()) or "-"
    return str(value)
