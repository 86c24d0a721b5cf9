"""The file that `lockstep tune --out FILE` writes and `lockstep train --settings FILE` reads: fast
settings, and what they were measured on.

It holds only settings that differ from the defaults, and none that change what is trained. They are
applied by name. The file may come from anywhere, so whatever does not fit is refused, by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from lockstep.config.knob import knobs, known
from lockstep.config.settings import Config, Settings
from lockstep.errors import UsageError

KIND = "lockstep tuned settings"
_VERSION = 1
_LARGEST = 2**16  # bytes
KNOBS = tuple(name for name, field in knobs(Config).items() if field.knob.tuned)


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedOn:
    """What the settings were measured on. A training elsewhere may use them, with a warning."""

    task: str
    workers: int
    device: str
    torch: str
    cpu: str
    cores: int
    threads: int
    """Intra-op threads of a rank, if the settings do not have them."""
    seconds: float
    """Seconds that the search was given."""
    lockstep: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Values of --set, by key."""
    ratio: float = 1.0
    """Step time divided by that of the defaults; both were measured in turns."""

    def differences(self, **here: Any) -> list[str]:
        """Return `workers=4 there and 2 here` for each given value that differs."""
        return [
            f"{name}={getattr(self, name)} there and {value} here"
            for name, value in here.items()
            if getattr(self, name) != value
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """Tuned settings. `settings`: by the names of KNOBS, only those that are not the defaults."""

    settings: Mapping[str, Any]
    measured: TunedOn

    def write(self, file: Path) -> None:
        """Write the file. Raises UsageError if that fails."""
        whole = {
            "kind": KIND,
            "version": _VERSION,
            "settings": dict(self.settings),
            "measured": asdict(self.measured),
        }
        try:
            file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                "cannot-write", name="--out", file=str(file), reason=str(error.strerror)
            ) from None

    @classmethod
    def read(cls, file: Path) -> Tuned:
        """Read the file. Raises UsageError, which says what is wrong, if it is not such a file."""
        found = _json(file)
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise _not_tuned(file, f'it lacks "kind": "{KIND}"')
        if found.get("version") != _VERSION:
            raise UsageError(
                "settings-of-another-version",
                file=str(file),
                version=found.get("version"),
                known=_VERSION,
            )
        settings, measured = found.get("settings"), found.get("measured")
        _check_names(file, "settings", settings, KNOBS)
        kinds = get_type_hints(TunedOn)
        _check_names(file, "measured", measured, kinds)
        assert isinstance(settings, dict)
        assert isinstance(measured, dict)
        for name, kind in kinds.items():
            plain = {float: int | float}.get(kind, get_origin(kind) or kind)
            value = measured.get(name)
            if isinstance(value, bool) or not isinstance(value, plain):
                told = repr(value) if name in measured else "missing"
                raise _not_tuned(file, f"measured {name} is {told}")
        try:
            Settings(task="any", **settings)
        except UsageError as error:
            raise error.within(f"--settings {file}") from None
        return cls(settings=settings, measured=TunedOn(**measured))


def _not_tuned(file: Path, problem: str) -> UsageError:
    return UsageError("not-tuned-settings", file=str(file), problem=problem)


def _json(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            content = stream.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(
            "cannot-read", name="--settings", file=str(file), reason=str(error.strerror)
        ) from None
    if len(content) > _LARGEST:
        raise _not_tuned(file, f"it has more than {_LARGEST} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _not_tuned(file, f"it is not JSON ({error})") from None


def _check_names(file: Path, what: str, found: object, names: Iterable[str]) -> None:
    if not isinstance(found, dict):
        raise _not_tuned(file, f"its {what} are a {type(found).__name__}, not names and values")
    if what == "settings" and "micro_batch" in found:
        raise UsageError("micro-batch-in-settings", file=str(file))
    one = "setting" if what == "settings" else "measured value"
    known(names, sorted(found), f"--settings {file}", one)
