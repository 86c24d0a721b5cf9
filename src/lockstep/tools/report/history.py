"""The course of a run: loss, metrics and throughput; starts, restarts, events and checkpoints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoints.folders import best_name, step_of, written
from lockstep.tools.recorded import Recorded, number
from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.judged import ranks
from lockstep.tools.svg import Plot
from lockstep.training.timeline import Anatomy, Generation

_POINTS = 400
"""Points in one curve: more than a phone or a sheet of paper can show."""
_TABLED = 12
_METRICS = 6
_OF_STEPS = {"lr": "Learning rate", "grad_norm": "Gradient norm"}
_COLOURS = ("var(--accent)", "var(--second)")
Curve = Sequence[tuple[int, float]]
"""Steps and values."""


def curves(recorded: Recorded) -> Section:
    """Return the curves of the training. The section is empty if no step was recorded."""
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
            f"The loss of each global batch before its update.{each}",
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
                f"{name} in each evaluation.",
                {"evaluation": _evaluated(recorded, name)},
                "",
            )
        )
    caption = f"Samples a second over all ranks, without evaluations.{each}"
    figures.append(_figure("Throughput", caption, {"training": speed}, "samples/s", from_zero=True))
    for name, title in _OF_STEPS.items():
        points = _curve(recorded, name)
        if len({value for _, value in points if math.isfinite(value)}) > 1:
            points, _ = thinned(points, _POINTS)
            figures.append(_figure(title, f"{title} of each step.{each}", {"training": points}, ""))
    left = len(names) - _METRICS
    text = [f"{left} more metrics are in metrics.jsonl."] if left > 0 else []
    return Section("curves", "Training", text, figures, folded=False)


def thinned(curve: Curve, points: int) -> tuple[Curve, int]:
    """Reduce a curve to at most `points` points, and return how many neighbours each one stands
    for. A point is the mean of these neighbours, at the step of the last one.
    """
    width = max(1, -(-len(curve) // points))
    groups = [curve[start : start + width] for start in range(0, len(curve), width)]
    return [(group[-1][0], _mean([value for _, value in group])) for group in groups], width


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _curve(recorded: Recorded, name: str) -> Curve:
    return [(int(record["step"]), number(record.get(name))) for record in recorded.steps]


def _evaluated(recorded: Recorded, name: str) -> Curve:
    return [
        (int(record["step"]), number(record["metrics"][name]))
        for record in recorded.evaluations
        if name in record["metrics"]
    ]


def _figure(
    title: str, caption: str, curves: Mapping[str, Curve], unit: str, *, from_zero: bool = False
) -> Illustration:
    """Draw `curves`: those of the training, of its evaluations, or both."""
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
        count = min(_TABLED, len(curve))
        chosen = sorted(
            {round((len(curve) - 1) * place / max(1, count - 1)) for place in range(count)}
        )
        rows += [
            [f"{name} {unit or title}", f"{curve[place][0]}", f"{curve[place][1]:.5g}"]
            for place in chosen
        ]
    return Illustration(
        title, plot.inside(), caption, Numbers(title, ["curve", "step", "value"], rows)
    )


_ROWS = 50
_MIB = 2**20


def history(recorded: Recorded) -> Section:
    """Return the tables of the run's starts, events and checkpoints."""
    tables = [
        table
        for table in (_generations(recorded), _events(recorded), _checkpoints(recorded.run))
        if table.rows
    ]
    return Section("history", "Starts, restarts, checkpoints", tables=tables)


def _generations(recorded: Recorded) -> Numbers:
    rows = (
        []
        if recorded.anatomy is None
        else list(_starts(recorded.anatomy, recorded.state == "under way"))
    )
    head = [
        "start",
        "ranks",
        "hosts",
        "steps",
        "in steps",
        "in evaluations",
        "in checkpoints",
        "ended",
    ]
    return Numbers("From each start to its end", head, rows)


def _starts(anatomy: Anatomy, under_way: bool) -> Iterator[Sequence[str]]:
    for place, each in enumerate(anatomy.generations, 1):
        hosts = list(dict.fromkeys(lane.begin.host for lane in each.lanes.values()))
        steps = f"{each.step + 1} to {each.last}" if each.last > each.step else "none"
        pauses = [f"{each.paused(what):.1f} s" for what in ("evaluate", "checkpoint")]
        latest = place == len(anatomy.generations)
        yield [
            str(place),
            str(each.workers),
            ", ".join(hosts),
            steps,
            f"{each.seconds:.1f} s",
            *pauses,
            _ended(each, latest and under_way),
        ]


def _ended(generation: Generation, under_way: bool) -> str:
    missing = f"; {ranks(generation.missing)} left no file" if generation.missing else ""
    killed = [rank for rank, lane in generation.lanes.items() if not lane.ended]
    if not killed:
        return f"normally{missing}"
    return f"{'under way' if under_way else f'cut off: {ranks(killed)}'}{missing}"


def _events(recorded: Recorded) -> Numbers:
    """Return a table of the latest events, in order."""
    found = recorded.events[-_ROWS:]
    left = len(recorded.events) - len(found)
    rows = [[str(event["event"]), str(event.get("step", "")), _line(event)] for event in found]
    caption = f"Events{f'; {left} earlier ones are in metrics.jsonl' if left else ''}"
    return Numbers(caption, ["event", "step", "what"], rows)


def _line(event: Any) -> str:
    values = {
        name: f"{value:.4g}" if isinstance(value, float) else value for name, value in event.items()
    }
    known = [
        f"{name} {value}"
        for name, value in values.items()
        if name not in ("kind", "event", "line", "step")
    ]
    return str(event.get("line") or event.get("reason") or ", ".join(known))


def _checkpoints(run: Path) -> Numbers:
    folders = written(run / "checkpoints")
    best = best_name(run / "checkpoints")
    rows = []
    for folder in folders[-_ROWS:]:
        try:
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        except FileNotFoundError:
            continue  # the run is under way and has just removed it
        rows.append(
            [
                folder.name,
                str(step_of(folder)),
                f"{size / _MIB:.2f} MiB",
                "best" if folder.name == best else "",
            ]
        )
    return Numbers("Checkpoints", ["checkpoint", "step", "size", "mark"], rows)
