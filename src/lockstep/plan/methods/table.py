"""A plan of methods: a row each, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.collectives.network import Link
from lockstep.plan.methods.cost import Computation, Gradients, seconds, traffic
from lockstep.plan.methods.measured import Measured
from lockstep.plan.methods.names import METHODS, method_of

REFERENCE = "native"


@dataclass(frozen=True, slots=True)
class Row:
    """One method."""

    method: str
    sends: float
    """Bytes of gradients that each rank, or the one that sends most, sends in a step."""
    seconds: float
    measured: Measured | None = None


def rows(gradients: Gradients, workers: int, link: Link, computation: Computation, measured: Mapping[str, Measured]) -> list[Row]:
    """The usual methods, and those that were measured beside them. Raises UsageError for a measured one with options that no plan knows."""
    names = [*METHODS, *(name for name in measured if name not in METHODS and not name.startswith("torch DDP"))]
    found = []
    for name in names:
        method = method_of(name)
        sends = traffic(method, gradients, workers).sends
        found.append(Row(name, sends, seconds(method, gradients, workers, link, computation), measured.get(name)))
    return found


def table(found: Sequence[Row]) -> str:
    """Times are of a step, on the mean; "native / it" above 1 is quicker than the sum of everything in every step, which is torch's DDP too."""
    reference = next(row for row in found if row.method == REFERENCE)
    real = reference.measured
    has_measured = any(row.measured is not None for row in found)
    lines = [f"{'method':<34}{'sent a step':>14}{'a step':>13}{'native / it':>13}" + "   measured" * has_measured]
    for row in found:
        line = f"{row.method:<34}{row.sends / 1e6:>11.3f} MB{1e3 * row.seconds:>10.1f} ms{reference.seconds / row.seconds:>13.2f}"
        if row.measured is not None:
            sent = "" if row.measured.sends is None else f"{row.measured.sends / 1e6:.3f} MB"
            ratio = "" if real is None else f"{real.seconds / row.measured.seconds:.2f}"
            line += f"{sent:>14}{1e3 * row.measured.seconds:>10.1f} ms{ratio:>7}"
        lines.append(line)
    return "\n".join(lines)


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    reference = next(row for row in found if row.method == REFERENCE)
    return [
        {
            "method": row.method,
            "bytes_sent": row.sends,
            "seconds": row.seconds,
            "speedup": reference.seconds / row.seconds,
            "measured_bytes_sent": row.measured.sends if row.measured else None,
            "measured_seconds": row.measured.seconds if row.measured else None,
        }
        for row in found
    ]
