"""Figures of time and memory by rank, and of who waits for whom. For a few steps, also when each
bucket of gradients was sent and summed, beside forward and backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.judged import WARM_UP, Judged, milliseconds
from lockstep.tools.svg import Plot
from lockstep.training.perfetto import offsets
from lockstep.training.timeline import Anatomy, Generation, MemoryLine, StepsLine

_RANKS = 8
Step = Mapping[int, StepsLine]
"""One step, by rank."""


def section(anatomy: Anatomy | None) -> Section:
    """Draw steps of the latest start that recorded steps with their times. The section is empty if
    none did.
    """
    generations = () if anatomy is None else anatomy.generations
    found = next((each for each in reversed(generations) if _recorded(each)), None)
    if anatomy is None or found is None:
        return Section("buckets", "Inside a step")
    steps, behind = _recorded(found), offsets(anatomy)
    shown = _chosen(
        {number: max(line.seconds for line in step.values()) for number, step in steps.items()}
    )
    figures = [
        _figure(each, _aligned(found, steps[each], behind), what) for each, what in shown.items()
    ]
    text = (
        "timeline.json holds every recorded step. Open it in ui.perfetto.dev or chrome://tracing."
    )
    return Section("buckets", "Inside a step", [text], figures)


def _recorded(generation: Generation) -> dict[int, Step]:
    """Return the steps whose times every rank has recorded, by number."""
    spanned = {
        rank: {line.first: line for line in lane.steps if line.spans}
        for rank, lane in generation.lanes.items()
    }
    numbers = set.intersection(*(set(lines) for lines in spanned.values()))
    return {
        number: {rank: lines[number] for rank, lines in spanned.items()}
        for number in sorted(numbers)
    }


def _chosen(seconds: Mapping[int, float]) -> dict[int, str]:
    """Choose a typical step and the slowest one, not from the warm-up; they may be the same."""
    numbers = sorted(seconds)
    numbers = numbers[min(WARM_UP, len(numbers) // 2) :]
    middle = statistics.median_low([seconds[number] for number in numbers])
    usual = next(number for number in numbers if seconds[number] == middle)
    slowest = max(numbers, key=lambda number: seconds[number])
    return {usual: "a typical one", **({slowest: "the slowest"} if slowest != usual else {})}


def _aligned(
    generation: Generation, step: Step, behind: Mapping[str, float]
) -> dict[int, StepsLine]:
    """Return a step in milliseconds since it began, on the clock of the first host."""
    by = {rank: behind[generation.lanes[rank].begin.host] for rank in step}
    origin = min(began + by[rank] for rank, line in step.items() for _, began, _ in line.spans)
    found = {}
    for rank, line in step.items():
        at = by[rank] - origin
        spans = tuple(
            (phase, 1e3 * (began + at), 1e3 * (ended + at)) for phase, began, ended in line.spans
        )
        buckets = tuple(
            (index, 1e3 * (left + at), None if done is None else 1e3 * (done + at))
            for index, left, done in line.buckets
        )
        found[rank] = replace(line, spans=spans, buckets=buckets)
    return found


def _figure(number: int, step: Step, what: str) -> Illustration:
    ranks = sorted(step)[:_RANKS]
    lines = {f"rank {rank}": step[rank] for rank in ranks}
    seen = {phase for line in lines.values() for phase, _, _ in line.spans}
    ends = [
        done
        for line in lines.values()
        for _, _, done in (*line.spans, *line.buckets)
        if done is not None
    ]
    legend = {NAMES[phase]: colour(phase) for phase in SHOWN if phase in seen}
    legend["bucket"] = colour("bucket")
    plot = Plot((0, max(ends)), "ms", rows=[*lines], row_height=40, legend=legend)
    for row, line in enumerate(lines.values()):
        for phase, began, ended in line.spans:
            if phase in SHOWN:
                plot.bar(began, ended, row + 0.08, 0.4, colour(phase))
        _buckets(plot, row, line)
    left = (
        f" Shown are the first {len(ranks)} of {len(step)} ranks." if len(step) > len(ranks) else ""
    )
    caption = (
        f"Step {number} is {what} of those recorded. The upper bar is the rank's phases. The lower"
        " one is its gradient buckets, each from when the rank sends it until its sum is"
        f" there.{left}"
    )
    return Illustration(f"Step {number}", plot.inside(), caption, _table(lines))


def _buckets(plot: Plot, row: int, line: StepsLine) -> None:
    """Draw thin bars below each other, so that overlapping buckets can be told apart."""
    height = 0.4 / max(1, len(line.buckets))
    for place, (index, left, done) in enumerate(line.buckets):
        if done is None:
            continue
        top = row + 0.52 + place * height
        plot.bar(left, done, top, height, colour("bucket"), stroke="var(--paper)")
        if len(line.buckets) <= 3:
            plot.inscribed(left, top + height / 2, str(index))


def _table(lines: Mapping[str, StepsLine]) -> Numbers:
    rows = []
    for name, line in lines.items():
        backward = [ended for phase, _, ended in line.spans if phase == "backward"]
        over = f"{max(backward):.2f}" if backward else "-"
        for index, left, done in line.buckets:
            there = "unknown" if done is None else f"{done:.2f}"
            rows.append([f"{name}, bucket {index}", f"{left:.2f}", there, over])
    head = ["bucket", "sent", "sum there", "backward ended"]
    return Numbers("Milliseconds after the step began", head, rows)


SHOWN = ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other")
"""The phases in the page's order; style.css has a colour for each."""
NAMES = {phase: phase for phase in SHOWN} | {"moving": "all-reduce", "waits": "waiting"}
_MOST = 32
"""The largest number of ranks in one figure."""
_NUMBERED = 8
"""The largest number of ranks for which the cells of the matrix show numbers."""
_PARTS = dict(parameters="forward", gradients="backward", optimizer="optimizer", activations="data")
"""The parts of memory, each with the phase whose colour it gets."""
_MIB = 2**20


def colour(phase: str) -> str:
    return f"var(--{phase})"


def _bars(rows: Sequence[str], unit: str, parts: Mapping[str, tuple[str, Sequence[float]]]) -> str:
    """Draw one bar per row from consecutive parts. `parts` gives for each name the phase whose
    colour it gets, and its length in every row.
    """
    longest = max(map(sum, zip(*(lengths for _, lengths in parts.values()), strict=True)))
    legend = {name: colour(phase) for name, (phase, _) in parts.items()}
    plot = Plot((0, longest), unit, rows=rows, legend=legend)
    begins = [0.0] * len(rows)
    for name, (phase, lengths) in parts.items():
        for row, length in enumerate(lengths):
            begin, begins[row] = begins[row], begins[row] + length
            plot.bar(begin, begins[row], row + 0.15, 0.7, colour(phase), stroke="var(--paper)")
            if plot.x(begins[row]) - plot.x(begin) > 5 * len(name) + 4:
                plot.inscribed(begin, row + 0.5, name)
    return plot.inside()


def times(judged: Judged | None) -> Section:
    """Draw the time of each rank by phase. The section is empty if nothing was recorded."""
    if judged is None:
        return Section("ranks", "Time by rank")
    figures = [_phases(judged)]
    if sum(judged.lost_to.values()) > 0:
        figures.append(_waits(judged))
    one, several = f"step {judged.first}", f"steps {judged.first} to {judged.last}"
    over = one if judged.first == judged.last else several
    text = [f"Means over {over}, without evaluations and checkpoints."]
    return Section("ranks", "Time by rank", text, figures, folded=False)


def _drawn(judged: Judged) -> dict[int, str]:
    """Return the names of the ranks or replicas that are shown, in order: all of them, or those
    that the others waited for longest.
    """
    numbers = list(judged.places)
    if len(numbers) > _MOST:
        numbers = sorted([number for number in judged.lost_to if number in judged.places][:_MOST])
    return {number: f"{_what(judged)} {number}" for number in numbers}


def _what(judged: Judged) -> str:
    return "rank" if judged.mesh is None else "replica"


def _left_out(judged: Judged, shown: Mapping[int, str]) -> str:
    left = len(judged.places) - len(shown)
    return (
        f" Shown are the {len(shown)} that others waited for most; {left} are not." if left else ""
    )


def _phases(judged: Judged) -> Illustration:
    shown = _drawn(judged)
    places = [judged.places[number] for number in shown]
    each = {phase: [place.each(phase) for place in places] for phase in (*SHOWN, "seconds")}
    bars = {NAMES[phase]: (phase, [1e3 * time for time in each[phase]]) for phase in SHOWN}
    columns: list[Sequence[float | None]] = [
        *each.values(),
        [place.hidden_each for place in places],
    ]
    rows = [list(map(_milliseconds, row)) for row in zip(*columns, strict=True)]
    table = Numbers(
        "Milliseconds a step",
        [_what(judged), *NAMES.values(), "step", "hidden"],
        _named(shown.values(), rows),
    )
    caption = (
        "The mean step of each rank by phase, in milliseconds. Communication behind computation"
        " costs no time and is not drawn."
        f"{_left_out(judged, shown)}"
    )
    return Illustration(
        "A step of each rank", _bars([*shown.values()], "ms a step", bars), caption, table
    )


def _named(names: Iterable[str], rows: Iterable[Iterable[str]]) -> list[list[str]]:
    return [[name, *row] for name, row in zip(names, rows, strict=True)]


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else milliseconds(seconds)


def _waits(judged: Judged) -> Illustration:
    shown = _drawn(judged)
    names, count = list(shown.values()), len(shown)
    waited = [[judged.places[row].waited_for(column) for column in shown] for row in shown]
    most = max(map(max, waited)) or 1.0
    below = {
        place + 0.5: str(number)
        for place, number in enumerate(shown)
        if place % max(1, count // 16) == 0
    }
    unit = "waited for this rank, ms a step"
    plot = Plot((0, count), unit, rows=names, row_height=19, numbers=below)
    for row, line in enumerate(waited):
        for column, time in enumerate(line):
            if time > 0:
                depth = f"{0.06 + 0.5 * time / most:.2f}"
                plot.bar(
                    column + 0.03, column + 0.97, row + 0.03, 0.94, "var(--accent)", opacity=depth
                )
            if count <= _NUMBERED and row != column:
                plot.said(column + 0.5, row + 0.5, milliseconds(time))
    rows = _named(names, (map(milliseconds, line) for line in waited))
    caption = "Milliseconds a step that the row waited for the column"
    table = Numbers(caption, [_what(judged), *names], rows)
    what = (
        "How long the rank on the left waited for the rank below, in milliseconds a step. Waits for"
        " the network are left out."
    )
    return Illustration(
        "Who waited for whom", plot.inside(), what + _left_out(judged, shown), table
    )


def memory(anatomy: Anatomy | None) -> Section:
    """Draw the memory of each rank, from the latest start that recorded it. The section is empty if
    none did.
    """
    found: dict[int, MemoryLine] = {}
    for generation in () if anatomy is None else anatomy.generations:
        found = {
            rank: lane.memory for rank, lane in generation.lanes.items() if lane.memory
        } or found
    if not found:
        return Section("memory", "Memory")
    shown = {f"rank {rank}": found[rank] for rank in sorted(found)[:_MOST]}
    size_of = {part: [getattr(each, part) for each in shown.values()] for part in (*_PARTS, "peak")}
    drawn = {part: [(size or 0) / _MIB for size in size_of[part]] for part in _PARTS}
    known = [part for part in _PARTS if any(drawn[part])] or ["parameters"]
    svg = _bars([*shown], "MiB", {part: (_PARTS[part], drawn[part]) for part in known})
    rows = [list(map(_mib, row)) for row in zip(*size_of.values(), strict=True)]
    table = Numbers("MiB", ["rank", *size_of], _named(shown, rows))
    more = f" Shown are the first {len(shown)} of {len(found)} ranks."
    caption = (
        "What each rank holds, in MiB. The peak is of the whole process, or of its GPU."
        f"{more if len(found) > len(shown) else ''}"
    )
    return Section(
        "memory", "Memory", figures=[Illustration("Memory by rank", svg, caption, table)]
    )


def _mib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / _MIB:.2f}" if size < 100 * _MIB else f"{size / _MIB:,.0f}"
