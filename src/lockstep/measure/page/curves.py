"""Loss, metrics and throughput over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lockstep.measure.page.parts import Figure, Section, Table
from lockstep.measure.page.recorded import Recorded, number
from lockstep.measure.page.svg import ACCENT, SECOND, Picture

_POINTS = 400
"""In one curve: more than a phone or a sheet of paper shows."""
_ROWS = 12
_METRICS = 6
Curve = tuple[Sequence[int], Sequence[float]]


def section(recorded: Recorded) -> Section:
    """Empty where no step was recorded."""
    if not recorded.steps:
        return Section(name="curves", title="Training")
    names = list(dict.fromkeys(name for record in recorded.evaluations for name in record["metrics"] if name != "loss"))
    shown = [_metric(recorded, name, f"metric{place}") for place, name in enumerate(names[:_METRICS])]
    left = len(names) - _METRICS
    text = [f"{left} more metrics are in metrics.jsonl."] if left > 0 else []
    return Section(name="curves", title="Training", figures=[_loss(recorded), *shown, _throughput(recorded)], text=text)


def thinned(curve: Curve, points: int) -> tuple[Curve, int]:
    """At most so many points, each the mean of as many neighbours, at the last one's step; and how many neighbours that are."""
    steps, values = curve
    width = -(-len(steps) // points) if steps else 1
    starts = range(0, len(steps), width)
    return (
        [steps[min(start + width, len(steps)) - 1] for start in starts],
        [_mean(values[start : start + width]) for start in starts],
    ), width


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _curve(recorded: Recorded, name: str) -> Curve:
    return [int(record["step"]) for record in recorded.steps], [number(record[name]) for record in recorded.steps]


def _evaluated(recorded: Recorded, name: str) -> Curve:
    found = [record for record in recorded.evaluations if name in record["metrics"]]
    return [int(record["step"]) for record in found], [number(record["metrics"][name]) for record in found]


def _each(width: int) -> str:
    return "" if width == 1 else f" Each point is the mean of {width} steps."


def _loss(recorded: Recorded) -> Figure:
    picture = Picture("loss", 2.4)
    (steps, values), width = thinned(_curve(recorded, "loss"), _POINTS)
    picture.axes.plot(steps, values, color=ACCENT, label="training", marker="." if len(steps) == 1 else "")
    tables = {"training loss": (steps, values)}
    held = _evaluated(recorded, "loss")
    if held[0]:
        picture.axes.plot(*held, color=SECOND, marker="o", markersize=3, label="evaluation")
        picture.legend(2)
        tables["evaluation loss"] = held
    _label(picture, "loss")
    caption = f"Loss over steps: of the whole global batch, before its update.{_each(width)}"
    return Figure(svg=picture.svg(), title="Loss", caption=caption, table=_table("Loss", tables))


def _metric(recorded: Recorded, name: str, picture_name: str) -> Figure:
    picture = Picture(picture_name, 2.4)
    curve = _evaluated(recorded, name)
    picture.axes.plot(*curve, color=SECOND, marker="o", markersize=3)
    _label(picture, "")
    return Figure(svg=picture.svg(), title=name, caption=f"{name} of each evaluation, over steps.", table=_table(name, {name: curve}))


def _throughput(recorded: Recorded) -> Figure:
    picture = Picture("throughput", 2.4)
    (steps, values), width = thinned(_curve(recorded, "samples_per_s"), _POINTS)
    picture.axes.plot(steps, values, color=ACCENT, marker="." if len(steps) == 1 else "")
    picture.axes.set_ylim(bottom=0)
    _label(picture, "samples/s")
    caption = f"Samples a second of all ranks, over steps; evaluations are left out.{_each(width)}"
    return Figure(svg=picture.svg(), title="Throughput", caption=caption, table=_table("Throughput", {"samples/s": (steps, values)}))


def _label(picture: Picture, what: str) -> None:
    picture.axes.set_xlabel("step")
    picture.axes.set_ylabel(what)
    picture.axes.grid(visible=True, axis="y")
    picture.axes.xaxis.get_major_locator().set_params(integer=True)


def _table(caption: str, curves: dict[str, Curve]) -> Table:
    """Rows spread evenly over the curve, the last one among them."""
    rows = []
    for name, (steps, values) in curves.items():
        count = min(_ROWS, len(steps))
        chosen = sorted({round((len(steps) - 1) * place / max(1, count - 1)) for place in range(count)}) if steps else []
        rows += [[name, f"{steps[place]}", f"{values[place]:.5g}"] for place in chosen]
    return Table(caption=caption, head=["", "step", "value"], rows=rows)
