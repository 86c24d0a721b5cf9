"""What benchmarks/slow_link.py wrote with --json, beside a plan of the same training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.collectives.network import Link
from lockstep.errors import UsageError
from lockstep.plan.links.fabrics import TCP
from lockstep.plan.links.networks import bits_per_second


@dataclass(frozen=True, slots=True)
class Measured:
    """One method, as it ran."""

    sends: float | None
    """Bytes a step: Lockstep's own count, without headers; None where only the interface counted."""
    seconds: float
    """A step, on the mean."""


def read(file: Path, *, task: str, workers: int, link: Link) -> dict[str, Measured]:
    """By method. Raises UsageError for another file, and where something else was measured than is planned."""
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        rows = {row["method"]: row for row in found["rows"] if row.get("problem") is None}
        setting = {"task": found["task"], "workers": int(found["workers"]), "rate": str(found["rate"])}
        measured = {name: Measured(row["counted"], float(row["mean"])) for name, row in rows.items()}
    except OSError as error:
        raise UsageError(f"--measured {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--measured {file} is not what benchmarks/slow_link.py writes with --json") from None
    _check(file, setting, task=task, workers=workers, link=link)
    return measured


def _check(file: Path, setting: Mapping[str, Any], *, task: str, workers: int, link: Link) -> None:
    bits = TCP * (bits_per_second(setting["rate"]) or 0.0)
    if (setting["task"], setting["workers"]) != (task, workers) or abs(bits / 8 - link.bandwidth) > 0.01 * link.bandwidth:
        raise UsageError(
            f"--measured {file} is of {setting['task']} with {setting['workers']} workers at {setting['rate']}, and the plan of {task} with "
            f"{workers} workers at {link.bandwidth * 8 / TCP / 1e6:g} Mbit/s: plan what was measured"
        )
