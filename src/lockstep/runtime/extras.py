"""Optional packages: how to install them, and warnings about untested versions."""

from __future__ import annotations

import json
import re
import warnings
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from lockstep.errors import LockstepWarning, UsageError

_NAME = "lockstep-train"


def install(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, in the form that works for this
    installation.
    """
    return f"pip install {_wanted(extra, Path(__file__).parents[3], _origin())}"


def missing(feature: str, package: str, extra: str) -> UsageError:
    """Return the error for a missing optional package.

    Args:
        feature: what needs the package.
        package: the package's common name.
        extra: the extra of pyproject.toml that installs it.
    """
    return UsageError("missing-extra", what=feature, package=package, install=install(extra))


def warn_untested(package: str, first: str, last: str) -> None:
    """Warn if Lockstep is not tested with the installed version of `package`.

    Args:
        package: its name as pip knows it.
        first: the oldest tested version, "major.minor".
        last: the newest tested version.
    """
    installed = version(package)
    if not _minor(first) <= _minor(installed) <= _minor(last):
        warnings.warn(
            f"{package} {installed} is installed; Lockstep is tested with {first} to {last}."
            " Install one of these if something fails",
            LockstepWarning,
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _wanted(extra: str, above: Path, origin: str | None) -> str:
    """Return the quoted requirement for pip. `above` is the folder that contains src/ in a
    checkout. `origin` is the URL of this installation, or None if it came from a package index.
    """
    if (above / "pyproject.toml").is_file() and (above / "src/lockstep").is_dir():
        folder = "." if above.resolve() == Path.cwd() else str(above)
        return f"-e '{folder}[{extra}]'"
    source = "" if origin is None else f" @ {origin}"
    return f"'{_NAME}[{extra}]{source}'"


def _origin() -> str | None:
    """Return the URL that pip recorded for this installation (PEP 610); None if there is none."""
    try:
        text = distribution(_NAME).read_text("direct_url.json")
        return None if text is None else str(json.loads(text)["url"])
    except (PackageNotFoundError, ValueError, KeyError):
        return None
