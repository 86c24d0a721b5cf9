"""Which settings a run had, and where each came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.tools.recorded import Recorded
from lockstep.tools.report.html import Numbers, Section
from lockstep.training.timeline.lines import Begin
from lockstep.training.tuned import Tuned

_BY_TASK = ("epochs", "precision", "compile")
"""What the task decides where nobody else does."""
_INSIDE = ("grow", "grow_if_wanted", "settings_file")
"""Between launcher and ranks; nothing that was asked for."""


def section(recorded: Recorded) -> Section:
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
