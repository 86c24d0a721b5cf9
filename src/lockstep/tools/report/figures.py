"""The figures of the page: time and memory by rank, who waits for whom, and the curves of the
training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain

from lockstep.runs import MemoryLine, Run, Spike, Timeline
from lockstep.tools.drawing import Plot
from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.rank_times import Judged, milliseconds, short

SHOWN = ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other")
"""The phases in the page's order; style.css has a colour for each."""
NAMES = {phase: phase for phase in SHOWN} | {"moving": "all-reduce", "waits": "waiting"}
_MOST = 32
"""The largest number of ranks in one figure."""
_NUMBERED = 8
"""The largest number of ranks for which the cells of the matrix show numbers."""
_PARTS = dict(parameters="forward", gradients="backward", optimizer="optimizer", peak="")
"""The parts of memory, each with the phase whose colour it gets."""
_MIB = 2**20
_POINTS = 400
"""Points in one curve: more than a phone or a sheet of paper can show."""
_TABLED = 12
_METRICS = 6
_COLOURS = {"training": "var(--accent)", "evaluation": "var(--second)", "spike": "var(--waits)"}
Curve = Sequence[tuple[int, float]]
"""Steps and values."""


Columns = Mapping[str, tuple[str, Sequence[float | None]]]
"""By name: the phase whose colour a part of the bars has, "" for a column that is only in the table,
and the values of all rows.
"""


def _bars(
    title: str, caption: str, unit: str, rows: Sequence[str], columns: Columns
) -> Illustration:
    """Draw one bar per row from consecutive parts, with a table of all columns."""
    legend = {name: f"var(--{phase})" for name, (phase, _) in columns.items() if phase}
    parts = {name: [value or 0.0 for value in columns[name][1]] for name in legend}
    longest = max(map(sum, zip(*parts.values(), strict=True)))
    plot = Plot((0, longest), unit, rows=rows, legend=legend)
    begins = [0.0] * len(rows)
    for name, lengths in parts.items():
        for row, length in enumerate(lengths):
            begin = begins[row]
            end = begin + length
            begins[row] = end
            plot.bar(begin, end, row + 0.15, 0.7, legend[name], stroke="var(--paper)")
            width = plot.x(end) - plot.x(begin)
            if width > 5 * len(name) + 4:
                plot.inscribe_small(begin, row + 0.5, name)
    cells = [rows, *(map(short, values) for _, values in columns.values())]
    table = Numbers(unit, ["", *columns], list(zip(*cells, strict=True)))
    return Illustration(title, plot.inside(), caption, table)


def times(judged: Judged | None) -> Section:
    """Draw the time of each rank by phase. The section is empty if nothing was recorded."""
    if judged is None:
        return Section("ranks", "Time by rank", [])
    lost_to = judged.lost_to
    numbers = list(judged.members)
    left_out = ""
    if len(numbers) > _MOST:
        longest_first = [number for number in lost_to if number in judged.members]
        numbers = sorted(longest_first[:_MOST])
        left = len(judged.members) - _MOST
        left_out = f" Shown are the {_MOST} that others waited for most; {left} are not."
    figures = [_phases(judged, numbers, left_out)]
    if sum(lost_to.values()) > 0:
        figures.append(_waits(judged, numbers, left_out))
    steps = f"steps {judged.first} to {judged.last}"
    if judged.first == judged.last:
        steps = f"step {judged.first}"
    text = f"Means over {steps}, without evaluations and checkpoints."
    return Section("ranks", "Time by rank", figures, text)


def _phases(judged: Judged, numbers: Sequence[int], left_out: str) -> Illustration:
    members = [judged.members[number] for number in numbers]
    columns: dict[str, tuple[str, Sequence[float | None]]] = {}
    for phase in SHOWN:
        columns[NAMES[phase]] = (phase, [1e3 * member.per_step(phase) for member in members])
    columns["step"] = ("", [1e3 * member.per_step("seconds") for member in members])
    columns["hidden"] = ("", [member.hidden_ms for member in members])
    caption = (
        "The mean step of each rank by phase, in milliseconds. Communication behind computation"
        f" costs no time and is not drawn.{left_out}"
    )
    names = [f"{judged.member} {number}" for number in numbers]
    return _bars("A step of each rank", caption, "ms a step", names, columns)


def _waits(judged: Judged, numbers: Sequence[int], left_out: str) -> Illustration:
    names = [f"{judged.member} {number}" for number in numbers]
    count = len(numbers)
    waited = []
    for number in numbers:
        member = judged.members[number]
        waited.append([member.waited_for(awaited) for awaited in numbers])
    longest = max(chain(*waited)) or 1.0
    every = max(1, count // 16)
    below = {column + 0.5: str(numbers[column]) for column in range(0, count, every)}
    unit = f"waited for this {judged.member}, ms a step"
    plot = Plot((0, count), unit, rows=names, row_height=19, numbers=below)
    rows = []
    for row, line in enumerate(waited):
        for column, seconds in enumerate(line):
            if seconds > 0:
                opacity = f"{0.06 + 0.5 * seconds / longest:.2f}"
                begin = column + 0.03
                end = column + 0.97
                plot.bar(begin, end, row + 0.03, 0.94, "var(--accent)", opacity=opacity)
            if count <= _NUMBERED and row != column:
                plot.inscribe(column + 0.5, row + 0.5, milliseconds(seconds))
        rows.append([names[row], *map(milliseconds, line)])
    head = "Milliseconds a step that the row waited for the column"
    table = Numbers(head, [judged.member, *names], rows)
    caption = (
        f"How long the {judged.member} on the left waited for the one below, in milliseconds a step."
        f" Waits for the network are left out.{left_out}"
    )
    return Illustration("Who waited for whom", plot.inside(), caption, table)


def memory(timeline: Timeline | None) -> Section:
    """Draw the memory of each rank, from the latest start that recorded it. The section is empty if
    none did.
    """
    memory_of = {} if timeline is None else _latest_memory(timeline)
    if not memory_of:
        return Section("memory", "Memory", [])
    shown = sorted(memory_of.items())[:_MOST]
    columns: dict[str, tuple[str, Sequence[float | None]]] = {}
    for part, phase in _PARTS.items():
        sizes = [getattr(memory_line, part) for _, memory_line in shown]
        columns[part] = (phase, [None if size is None else size / _MIB for size in sizes])
    caption = "What each rank holds, in MiB. The peak is of the whole process, or of its GPU."
    if len(shown) < len(memory_of):
        caption += f" Shown are the first {len(shown)} of {len(memory_of)} ranks."
    names = [f"rank {rank}" for rank, _ in shown]
    figure = _bars("Memory by rank", caption, "MiB", names, columns)
    return Section("memory", "Memory", [figure], folded=True)


def _latest_memory(timeline: Timeline) -> dict[int, MemoryLine]:
    """Return the memory of each rank in the latest start in which any rank recorded it."""
    for start in reversed(timeline.starts):
        memory_of = {rank: lane.memory for rank, lane in start.lanes.items() if lane.memory}
        if memory_of:
            return memory_of
    return {}


def training(run: Run, spikes: Sequence[Spike]) -> Section:
    """Draw the curves of the training, with its spikes. The section is empty if no step was
    recorded.
    """
    if not run.steps:
        return Section("curves", "Training", [])
    width = -(-len(run.steps) // _POINTS)
    smoothing = "" if width == 1 else f" Each point is the median of {width} steps."
    evaluated: dict[str, list[tuple[int, float]]] = {}
    for evaluation in run.evaluations:
        for name, value in evaluation.metrics.items():
            evaluated.setdefault(name, []).append((evaluation.step, value))
    losses: dict[str, Curve] = {"training": _thinned(run, "loss", width)}
    if "loss" in evaluated:
        losses["evaluation"] = evaluated.pop("loss")
    caption = f"The loss of each global batch before its update.{smoothing}"
    if spikes:
        losses["spike"] = [(spike.step, spike.loss) for spike in spikes]
        caption += " Points are spikes: far above the median of the steps before."
    figures = [_figure("Loss", caption, losses, "loss")]
    for name in list(evaluated)[:_METRICS]:
        caption = f"{name} in each evaluation."
        figures.append(_figure(name, caption, {"evaluation": evaluated[name]}, ""))
    speed = {"training": _thinned(run, "samples_per_s", width)}
    caption = f"Samples a second over all ranks, without evaluations.{smoothing}"
    figures.append(_figure("Throughput", caption, speed, "samples/s", from_zero=True))
    for name, title in {"lr": "Learning rate", "grad_norm": "Gradient norm"}.items():
        points = _thinned(run, name, width)
        if len({value for _, value in points if math.isfinite(value)}) > 1:
            caption = f"{title} of each step.{smoothing}"
            figures.append(_figure(title, caption, {"training": points}, ""))
    left = len(evaluated) - _METRICS
    text = f"{left} more metrics are in metrics.jsonl." if left > 0 else ""
    return Section("curves", "Training", figures, text)


def _thinned(run: Run, name: str, width: int) -> Curve:
    """Return a point for every `width` steps: the median of their finite values, at the last one."""
    points = []
    for first in range(0, len(run.steps), width):
        records = run.steps[first : first + width]
        values = [getattr(record, name) for record in records]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        points.append((records[-1].step, statistics.median(finite) if finite else math.nan))
    return points


def _figure(
    title: str, caption: str, curves: Mapping[str, Curve], unit: str, *, from_zero: bool = False
) -> Illustration:
    """Draw `curves` by name. Spikes are points; those above all curves are drawn at the top."""
    lines = [curve for name, curve in curves.items() if name != "spike"]
    steps = [step for step, _ in chain(*lines)]
    values = [value for _, value in chain(*lines) if math.isfinite(value)] or [0.0]
    most = max(values)
    least = 0.0 if from_zero else min(values)
    room = 0.05 * (most - least)
    bottom = least if from_zero else least - room
    legend = {name: _COLOURS[name] for name in curves} if len(curves) > 1 else None
    plot = Plot(
        (min(steps), max(steps)), "step", up=(bottom, most + room), up_label=unit, legend=legend
    )
    rows = []
    for name, curve in curves.items():
        if name == "spike":
            for step, value in curve:
                plot.dot(plot.x(step), plot.y(min(value, most)), 3, _COLOURS[name])
        else:
            plot.curve(curve, _COLOURS[name], dots=name == "evaluation")
        every = -(-len(curve) // _TABLED)
        for step, value in curve[::-every][::-1]:
            rows.append([f"{name} {unit or title}", f"{step}", f"{value:.5g}"])
    table = Numbers(title, ["curve", "step", "value"], rows)
    return Illustration(title, plot.inside(), caption, table)
