"""A few steps from the inside: when each bucket of gradients left and was there, against forward and backward."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.anatomy.generation import Anatomy, Generation
from lockstep.anatomy.lines import Steps
from lockstep.anatomy.timeline import offsets
from lockstep.measure.page.parts import Figure, Section, Table
from lockstep.measure.page.ranks import NAMES
from lockstep.measure.page.svg import PAPER, PHASE_COLOURS, Picture
from lockstep.measure.verdict.judged import WARM_UP

_RANKS = 8
Step = Mapping[int, Steps]
"""One step of every rank, times on one clock."""


def section(anatomy: Anatomy | None) -> Section:
    """Empty where no step was recorded with its times."""
    found = None if anatomy is None else _latest(anatomy)
    if anatomy is None or found is None:
        return Section(name="buckets", title="Inside a step")
    behind = offsets(anatomy)
    steps = {number: _aligned(found, step, behind) for number, step in _recorded(found).items()}
    shown = _chosen({number: max(line.seconds for line in step.values()) for number, step in steps.items()})
    figures = [_figure(number, steps[number], what) for number, what in shown.items()]
    text = ["Every recorded step is in timeline.json; open it with ui.perfetto.dev or chrome://tracing."]
    return Section(name="buckets", title="Inside a step", text=text, figures=figures)


def _latest(anatomy: Anatomy) -> Generation | None:
    return next((each for each in reversed(anatomy.generations) if _recorded(each)), None)


def _recorded(generation: Generation) -> dict[int, Step]:
    """The steps whose times every rank has kept, by number."""
    spanned = {rank: {line.first: line for line in lane.steps if line.spans} for rank, lane in generation.lanes.items()}
    numbers = set.intersection(*(set(lines) for lines in spanned.values()))
    return {number: {rank: lines[number] for rank, lines in spanned.items()} for number in sorted(numbers)}


def _chosen(seconds: Mapping[int, float]) -> dict[int, str]:
    """A usual step, and the slowest, where that is another; not from the warm-up."""
    numbers = sorted(seconds)
    numbers = numbers[min(WARM_UP, len(numbers) // 2) :]
    middle = statistics.median_low([seconds[number] for number in numbers])
    usual = next(number for number in numbers if seconds[number] == middle)
    slowest = max(numbers, key=lambda number: seconds[number])
    return {usual: "a usual one", **({slowest: "the slowest recorded"} if slowest != usual else {})}


def _aligned(generation: Generation, step: Step, behind: Mapping[str, float]) -> dict[int, Steps]:
    """On the clock of the first host."""
    found = {}
    for rank, line in step.items():
        by = behind[generation.lanes[rank].begin.host]
        spans = tuple((phase, began + by, ended + by) for phase, began, ended in line.spans)
        buckets = tuple((index, left + by, None if done is None else done + by) for index, left, done in line.buckets)
        found[rank] = replace(line, spans=spans, buckets=buckets)
    return found


def _figure(number: int, step: Step, what: str) -> Figure:
    ranks = sorted(step)[:_RANKS]
    origin = min(span[1] for line in step.values() for span in line.spans)
    picture = Picture(f"step{number}", 1.5 + 0.55 * len(ranks))
    named: set[str] = set()
    for row, rank in enumerate(ranks):
        for phase, colour in PHASE_COLOURS.items():
            pieces = [(1e3 * (began - origin), 1e3 * (ended - began)) for each, began, ended in step[rank].spans if each == phase]
            if pieces:
                label = NAMES.get(phase, phase) if phase not in named else None
                named.add(phase)
                picture.axes.broken_barh(pieces, (row - 0.4, 0.4), facecolors=colour, label=label)
        _buckets(picture, row, step[rank], origin)
    picture.axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    picture.axes.set_ylim(len(ranks) - 0.5, -0.6)
    picture.axes.tick_params(axis="y", length=0)
    picture.axes.set_xlabel("ms")
    picture.legend(4)
    left = f" Of {len(step)} ranks the first {len(ranks)} are shown." if len(step) > len(ranks) else ""
    caption = f"Step {number}, {what}. Above: the rank's phases; below: its buckets of gradients, from when each left the rank until its sum was there.{left}"
    return Figure(svg=picture.svg(), title=f"Step {number}", caption=caption, table=_table(step, ranks, origin))


def _buckets(picture: Picture, row: int, line: Steps, origin: float) -> None:
    """Thin bars one under the other, so that those that overlap can be told apart."""
    count = max(1, len(line.buckets))
    height = 0.4 / count
    for place, (index, left, done) in enumerate(line.buckets):
        if done is None:
            continue
        top = row + 0.04 + place * height
        piece = (1e3 * (left - origin), 1e3 * (done - left))
        label = "a bucket" if row == place == 0 else None
        picture.axes.broken_barh([piece], (top, height), facecolors=PHASE_COLOURS["moving"], edgecolor=PAPER, linewidth=0.4, label=label)
        if count <= 3:
            picture.axes.text(piece[0], top + height / 2, f" {index}", va="center", fontsize=8, color=PAPER)


def _table(step: Step, ranks: Sequence[int], origin: float) -> Table:
    rows = []
    for rank in ranks:
        backward = [span for span in step[rank].spans if span[0] == "backward"]
        over = f"{1e3 * (max(span[2] for span in backward) - origin):.2f}" if backward else "-"
        for index, left, done in step[rank].buckets:
            there = "not known" if done is None else f"{1e3 * (done - origin):.2f}"
            rows.append([f"rank {rank}, bucket {index}", f"{1e3 * (left - origin):.2f}", there, over])
    return Table(caption="Milliseconds after the step began", head=["", "left", "sum was there", "backward was over"], rows=rows)
