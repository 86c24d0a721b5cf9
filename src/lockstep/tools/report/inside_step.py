"""A few steps from the inside: when each bucket of gradients left and was there, against forward
and backward.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.judged import WARM_UP
from lockstep.tools.report.rank_figures import NAMES, SHOWN, colour
from lockstep.tools.svg import Plot
from lockstep.training.timeline.lanes import Anatomy, Generation
from lockstep.training.timeline.lines import StepsLine
from lockstep.training.timeline.perfetto import offsets

_RANKS = 8
Step = Mapping[int, StepsLine]
"""One step of every rank."""


def section(anatomy: Anatomy | None) -> Section:
    """Of the latest stretch in which steps were recorded with their times. Empty where none was."""
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
        "Every recorded step is in timeline.json; open it with ui.perfetto.dev or chrome://tracing."
    )
    return Section("buckets", "Inside a step", [text], figures)


def _recorded(generation: Generation) -> dict[int, Step]:
    """The steps whose times every rank has kept, by number."""
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
    """A usual step, and the slowest, where that is another; not from the warm-up."""
    numbers = sorted(seconds)
    numbers = numbers[min(WARM_UP, len(numbers) // 2) :]
    middle = statistics.median_low([seconds[number] for number in numbers])
    usual = next(number for number in numbers if seconds[number] == middle)
    slowest = max(numbers, key=lambda number: seconds[number])
    return {usual: "a usual one", **({slowest: "the slowest recorded"} if slowest != usual else {})}


def _aligned(
    generation: Generation, step: Step, behind: Mapping[str, float]
) -> dict[int, StepsLine]:
    """In milliseconds since the step began, on the clock of the first host; the first ranks."""
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
    plot = Plot((0, max(ends)), "ms", rows=[*lines], row_height=40, legend=legend)
    for row, line in enumerate(lines.values()):
        for phase, began, ended in line.spans:
            if phase in SHOWN:
                plot.bar(began, ended, row + 0.08, 0.4, colour(phase))
        _buckets(plot, row, line)
    left = (
        f" Of {len(step)} ranks the first {len(ranks)} are shown." if len(step) > len(ranks) else ""
    )
    caption = (
        f"Step {number}, {what}. Above: the rank's phases; below: its buckets of gradients, from"
        f" when each left the rank until its sum was there.{left}"
    )
    return Illustration(f"Step {number}", plot.inside(), caption, _table(lines))


def _buckets(plot: Plot, row: int, line: StepsLine) -> None:
    """Thin bars one under the other, so that those that overlap can be told apart."""
    height = 0.4 / max(1, len(line.buckets))
    for place, (index, left, done) in enumerate(line.buckets):
        if done is None:
            continue
        top = row + 0.52 + place * height
        plot.bar(left, done, top, height, colour("moving"), stroke="var(--paper)")
        if len(line.buckets) <= 3:
            plot.inscribed(left, top + height / 2, str(index))


def _table(lines: Mapping[str, StepsLine]) -> Numbers:
    rows = []
    for name, line in lines.items():
        backward = [ended for phase, _, ended in line.spans if phase == "backward"]
        over = f"{max(backward):.2f}" if backward else "-"
        for index, left, done in line.buckets:
            there = "not known" if done is None else f"{done:.2f}"
            rows.append([f"{name}, bucket {index}", f"{left:.2f}", there, over])
    head = ["", "left", "sum was there", "backward was over"]
    return Numbers("Milliseconds after the step began", head, rows)
