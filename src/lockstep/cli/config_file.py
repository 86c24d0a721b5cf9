"""`--config FILE`: options from a TOML or YAML file, by the names that they have on the command
line, which comes before it.

sync_every = 8                  as --sync-every 8
set = {lr = 0.05}               as --set lr=0.05
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.knob import Field, known
from lockstep.errors import UsageError

_LARGEST = 2**20  # bytes


def below(given: Mapping[str, Any], file: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    """What was given, and beneath it what the file says. One line on stderr where the two
    disagree. Raises UsageError.
    """
    by_option = {_name(field): field for field in fields.values()}
    found = {str(key).replace("-", "_"): value for key, value in _read(file).items()}
    known(by_option, found, str(file))
    values = {
        by_option[key].name: _value(by_option[key], value, file) for key, value in found.items()
    }
    beaten = [name for name in values if name in given and values[name] != given[name]]
    if beaten:
        told = "; ".join(
            f"{_name(fields[name])}={given[name]} replaces {values[name]}" for name in beaten
        )
        print(f"{file}: the command line comes first: {told}", file=sys.stderr)
    return {**values, **given}


def _name(field: Field) -> str:
    """As in a file: the option without its dashes."""
    return field.flags[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _value(field: Field, value: Any, file: Path) -> Any:
    if field.is_mapping and isinstance(value, Mapping):
        return {str(key): str(each) for key, each in value.items()}
    if field.type is Path and isinstance(value, str):
        return Path(value)
    try:
        field.check(
            field.type.read(value)
            if isinstance(value, str) and hasattr(field.type, "read")
            else value
        )
    except UsageError as error:
        raise error.within(str(file)) from None
    return value


def _read(file: Path) -> dict[str, Any]:
    kind = file.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            "wrong-ending", option="--config", file=file, endings=[".toml", ".yaml", ".yml"]
        )
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("cannot-read", name="--config", file=file, reason=error) from None
    if len(text) > _LARGEST:
        raise UsageError("config-file-too-large", file=file, most=_LARGEST)
    found = _toml(text, file) if kind == ".toml" else _yaml(text, file)
    if not isinstance(found, dict):
        raise UsageError("config-file-without-names", file=file, kind=type(found).__name__)
    return found


def _toml(text: str, file: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            "config-file-not-parsed", file=file, language="TOML", reason=error
        ) from None


def _yaml(text: str, file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "missing-extra", what=f"--config {file}", package="PyYAML", install="pip install pyyaml"
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(
            "config-file-not-parsed",
            file=file,
            language="YAML",
            reason=" ".join(str(error).split()),
        ) from None
