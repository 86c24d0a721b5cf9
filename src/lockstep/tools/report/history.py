"""The course of a run: loss, metrics and throughput; starts, restarts, events and checkpoints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
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
_COLOURS = {"training": "var(--accent)", "evaluation": "var(--second)"}
Curve = Sequence[tuple[int, float]]
"""Steps and values."""


def curves(recorded: Recorded) -> Section:
    """Return the curves of the training. The section is empty if no step was recorded."""
    if not recorded.steps:
        return Section("curves", "Training")
    training, width = thinned(_curve(recorded, "loss"), _POINTS)
    smoothing = "" if width == 1 else f" Each point is the mean of {width} steps."
    losses = {"training": training}
    evaluation = _evaluated(recorded, "loss")
    if evaluation:
        losses["evaluation"] = evaluation
    caption = f"The loss of each global batch before its update.{smoothing}"
    figures = [_figure("Loss", caption, losses, "loss")]
    names = _metrics(recorded)
    for name in names[:_METRICS]:
        evaluations = {"evaluation": _evaluated(recorded, name)}
        figures.append(_figure(name, f"{name} in each evaluation.", evaluations, ""))
    speed, _ = thinned(_curve(recorded, "samples_per_s"), _POINTS)
    caption = f"Samples a second over all ranks, without evaluations.{smoothing}"
    figures.append(_figure("Throughput", caption, {"training": speed}, "samples/s", from_zero=True))
    for name, title in _OF_STEPS.items():
        points = _curve(recorded, name)
        if len({value for _, value in points if math.isfinite(value)}) > 1:
            points, _ = thinned(points, _POINTS)
            caption = f"{title} of each step.{smoothing}"
            figures.append(_figure(title, caption, {"training": points}, ""))
    left = len(names) - _METRICS
    text = [f"{left} more metrics are in metrics.jsonl."] if left > 0 else []
    return Section("curves", "Training", text, figures, folded=False)


def _metrics(recorded: Recorded) -> list[str]:
    """Return the names of all metrics but the loss, in the order in which they first appear."""
    names: dict[str, None] = {}
    for record in recorded.evaluations:
        names |= dict.fromkeys(record["metrics"])
    names.pop("loss", None)
    return list(names)


def thinned(curve: Curve, points: int) -> tuple[Curve, int]:
    """Reduce a curve to at most `points` points, and return how many neighbours each one stands
    for. A point is the mean of these neighbours, at the step of the last one.
    """
    width = max(1, -(-len(curve) // points))
    means = []
    for start in range(0, len(curve), width):
        neighbours = curve[start : start + width]
        last_step, _ = neighbours[-1]
        means.append((last_step, _mean([value for _, value in neighbours])))
    return means, width


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
    points = list(chain(*curves.values()))
    steps = [step for step, _ in points]
    values = [value for _, value in points if math.isfinite(value)] or [0.0]
    least = 0.0 if from_zero else min(values)
    most = max(values)
    room = 0.05 * (most - least)
    plot = Plot(
        (min(steps), max(steps)),
        "step",
        up=(least if from_zero else least - room, most + room),
        up_label=unit,
        legend=_COLOURS if len(curves) > 1 else None,
    )
    rows = []
    for name, curve in curves.items():
        plot.curve(curve, _COLOURS[name], dots=name == "evaluation")
        for step, value in _spread(curve, _TABLED):
            rows.append([f"{name} {unit or title}", f"{step}", f"{value:.5g}"])
    table = Numbers(title, ["curve", "step", "value"], rows)
    return Illustration(title, plot.inside(), caption, table)


def _spread(curve: Curve, most: int) -> Curve:
    """Return at most `most` points of the curve at equal distances, the first and the last too."""
    last = len(curve) - 1
    intervals = max(1, min(most, len(curve)) - 1)
    indices = {round(last * number / intervals) for number in range(intervals + 1)}
    return [curve[index] for index in sorted(indices)]


_ROWS = 50
_MIB = 2**20


def history(recorded: Recorded) -> Section:
    """Return the tables of the run's starts, events and checkpoints."""
    tables = [_generations(recorded), _events(recorded), _checkpoints(recorded.run)]
    filled = [table for table in tables if table.rows]
    return Section("history", "Starts, restarts, checkpoints", tables=filled)


def _generations(recorded: Recorded) -> Numbers:
    rows: list[Sequence[str]] = []
    if recorded.anatomy is not None:
        rows += _starts(recorded.anatomy, recorded.state == "under way")
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
    for start, generation in enumerate(anatomy.generations, 1):
        hosts = dict.fromkeys(lane.begin.host for lane in generation.lanes.values())
        steps = "none"
        if generation.last > generation.step:
            steps = f"{generation.step + 1} to {generation.last}"
        latest = start == len(anatomy.generations)
        yield [
            str(start),
            str(generation.workers),
            ", ".join(hosts),
            steps,
            f"{generation.seconds:.1f} s",
            f"{generation.paused('evaluate'):.1f} s",
            f"{generation.paused('checkpoint'):.1f} s",
            _ended(generation, latest and under_way),
        ]


def _ended(generation: Generation, under_way: bool) -> str:
    missing = f"; {ranks(generation.missing)} left no file" if generation.missing else ""
    cut_off = [rank for rank, lane in generation.lanes.items() if not lane.ended]
    if not cut_off:
        return f"normally{missing}"
    if under_way:
        return f"under way{missing}"
    return f"cut off: {ranks(cut_off)}{missing}"


def _events(recorded: Recorded) -> Numbers:
    """Return a table of the latest events, in order."""
    shown = recorded.events[-_ROWS:]
    rows = [[str(event["event"]), str(event.get("step", "")), _line(event)] for event in shown]
    caption = "Events"
    left = len(recorded.events) - len(shown)
    if left:
        caption += f"; {left} earlier ones are in metrics.jsonl"
    return Numbers(caption, ["event", "step", "what"], rows)


def _line(event: Any) -> str:
    values = []
    for name, value in event.items():
        if name not in ("kind", "event", "line", "step"):
            values.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return str(event.get("line") or event.get("reason") or ", ".join(values))


def _checkpoints(run: Path) -> Numbers:
    best = best_name(run / "checkpoints")
    rows = []
    for folder in written(run / "checkpoints")[-_ROWS:]:
        try:
            size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        except FileNotFoundError:
            continue  # the run is under way and has just removed it
        mark = "best" if folder.name == best else ""
        rows.append([folder.name, str(step_of(folder)), f"{size / _MIB:.2f} MiB", mark])
    return Numbers("Checkpoints", ["checkpoint", "step", "size", "mark"], rows)
