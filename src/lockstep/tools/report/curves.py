"""Loss, metrics and throughput over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from lockstep.tools.recorded import Recorded, number
from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.svg import Plot

_POINTS = 400
"""In one curve: more than a phone or a sheet of paper shows."""
_ROWS = 12
_METRICS = 6
_COLOURS = ("var(--accent)", "var(--second)")
Curve = Sequence[tuple[int, float]]
"""Steps and values."""


def section(recorded: Recorded) -> Section:
    """Empty where no step was recorded."""
    if not recorded.steps:
        return Section("curves", "Training")
    training, width = thinned(_curve(recorded, "loss"), _POINTS)
    speed, _ = thinned(_curve(recorded, "samples_per_s"), _POINTS)
    each = "" if width == 1 else f" Each point is the mean of {width} steps."
    held = _evaluated(recorded, "loss")
    losses = {"training": training, **({"evaluation": held} if held else {})}
    figures = [
        _figure(
            "Loss",
            f"Loss over steps: of the whole global batch, before its update.{each}",
            losses,
            "loss",
        )
    ]
    names = list(
        dict.fromkeys(
            name for record in recorded.evaluations for name in record["metrics"] if name != "loss"
        )
    )
    for name in names[:_METRICS]:
        figures.append(
            _figure(
                name,
                f"{name} of each evaluation, over steps.",
                {"evaluation": _evaluated(recorded, name)},
                "",
            )
        )
    caption = f"Samples a second of all ranks, over steps; evaluations are left out.{each}"
    figures.append(_figure("Throughput", caption, {"training": speed}, "samples/s", from_zero=True))
    left = len(names) - _METRICS
    text = [f"{left} more metrics are in metrics.jsonl."] if left > 0 else []
    return Section("curves", "Training", text, figures)


def thinned(curve: Curve, points: int) -> tuple[Curve, int]:
    """At most so many points, each the mean of as many neighbours, at the last one's step; and
    how many neighbours that are.
    """
    width = max(1, -(-len(curve) // points))
    groups = [curve[start : start + width] for start in range(0, len(curve), width)]
    return [(group[-1][0], _mean([value for _, value in group])) for group in groups], width


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _curve(recorded: Recorded, name: str) -> Curve:
    return [(int(record["step"]), number(record[name])) for record in recorded.steps]


def _evaluated(recorded: Recorded, name: str) -> Curve:
    return [
        (int(record["step"]), number(record["metrics"][name]))
        for record in recorded.evaluations
        if name in record["metrics"]
    ]


def _figure(
    title: str, caption: str, curves: Mapping[str, Curve], unit: str, *, from_zero: bool = False
) -> Illustration:
    """`curves`: of the training, of its evaluations, or both."""
    steps = [step for curve in curves.values() for step, _ in curve]
    values = [value for curve in curves.values() for _, value in curve if math.isfinite(value)] or [
        0.0
    ]
    least, most = 0.0 if from_zero else min(values), max(values)
    room = 0.05 * (most - least)
    colours = dict(zip(("training", "evaluation"), _COLOURS, strict=True))
    legend = colours if len(curves) > 1 else None
    up = (least if from_zero else least - room, most + room)
    plot = Plot((min(steps), max(steps)), "step", up=up, up_label=unit, legend=legend)
    rows = []
    for name, curve in curves.items():
        plot.curve(curve, colours[name], dots=name == "evaluation")
        count = min(_ROWS, len(curve))
        chosen = sorted(
            {round((len(curve) - 1) * place / max(1, count - 1)) for place in range(count)}
        )
        rows += [
            [f"{name} {unit or title}", f"{curve[place][0]}", f"{curve[place][1]:.5g}"]
            for place in chosen
        ]
    return Illustration(title, plot.inside(), caption, Numbers(title, ["", "step", "value"], rows))
