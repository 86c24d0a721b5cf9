"""Where each rank's time goes, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.measure.page.parts import Figure, Section, Table
from lockstep.measure.page.svg import ACCENT, INK, PHASE_COLOURS, Picture
from lockstep.measure.verdict.judged import Judged, Place
from lockstep.measure.verdict.stragglers import lost_to
from lockstep.measure.verdict.words import milliseconds

MOST = 32
"""Ranks in one figure."""
NAMES = {"moving": "sending, adding", "waits": "waiting"}
_NUMBERED = 8
"""Ranks up to which a matrix has its figures written into its cells."""


def section(judged: Judged | None) -> Section:
    """Empty where nothing was recorded."""
    if judged is None:
        return Section(name="ranks", title="Where the time went")
    figures = [_phases(judged)]
    if lost_to(judged) and sum(lost_to(judged).values()) > 0:
        figures.append(_waits(judged))
    steps = f"step {judged.first}" if judged.first == judged.last else f"steps {judged.first} to {judged.last}"
    text = [f"Means over {steps} of one stretch; the first steps warm up and are left out, as are evaluations and checkpoints."]
    return Section(name="ranks", title="Where the time went", text=text, figures=figures)


def chosen(judged: Judged) -> list[int]:
    """The places that are shown, in order: all, or those that were waited for most."""
    if len(judged.places) <= MOST:
        return list(judged.places)
    return sorted([number for number in lost_to(judged) if number in judged.places][:MOST])


def _phases(judged: Judged) -> Figure:
    shown = chosen(judged)
    picture = Picture("phases", 1.3 + 0.24 * len(shown))
    left = dict.fromkeys(shown, 0.0)
    for phase, colour in PHASE_COLOURS.items():
        widths = [1e3 * judged.places[number].each(phase) for number in shown]
        label = NAMES.get(phase, phase)
        picture.axes.barh(range(len(shown)), widths, left=list(left.values()), color=colour, height=0.7, label=label)
        left = {number: left[number] + width for number, width in zip(shown, widths, strict=True)}
    _ranks_down(picture, judged, shown)
    picture.axes.set_xlabel("ms a step")
    picture.legend(4)
    caption = (
        "Mean step of each rank by phase, in milliseconds. Communication that went on behind the computation is in no bar; "
        f"what was not hidden is sending, adding, and waiting.{_left_out(judged, shown)}"
    )
    return Figure(svg=picture.svg(), title="Step anatomy", caption=caption, table=_phase_table(judged))


def _phase_table(judged: Judged) -> Table:
    head = ["", *(NAMES.get(phase, phase) for phase in PHASE_COLOURS), "step", "hidden"]
    rows = []
    for number in chosen(judged):
        place = judged.places[number]
        hidden = "not known" if place.hidden_each is None else milliseconds(place.hidden_each)
        rows.append([name(judged, number), *(milliseconds(place.each(phase)) for phase in (*PHASE_COLOURS, "seconds")), hidden])
    return Table(caption="Milliseconds a step", head=head, rows=rows)


def _waits(judged: Judged) -> Figure:
    shown = chosen(judged)
    times = [[_waited(judged.places[row], column) for column in shown] for row in shown]
    most = max((time for row in times for time in row), default=0.0) or 1.0
    picture = Picture("waits", 1.4 + 0.26 * len(shown))
    for row, each in enumerate(times):
        for column, time in enumerate(each):
            if time > 0:
                picture.axes.barh(row, 0.94, left=column - 0.47, height=0.94, color=ACCENT, alpha=0.06 + 0.5 * time / most)
            if len(shown) <= _NUMBERED and row != column:
                picture.axes.text(column, row, milliseconds(time), ha="center", va="center", color=INK, fontsize=9)
    _ranks_down(picture, judged, shown)
    picture.axes.set_xlim(-0.5, len(shown) - 0.5)
    every = max(1, len(shown) // 16)
    picture.axes.set_xticks(range(0, len(shown), every), [str(number) for number in shown[::every]])
    picture.axes.set_xlabel("was waited for by the rank on the left, ms a step")
    rows = [[name(judged, row), *(milliseconds(time) for time in each)] for row, each in zip(shown, times, strict=True)]
    table = Table(
        caption="Milliseconds a step that the row waited for the column", head=["", *(name(judged, each) for each in shown)], rows=rows
    )
    caption = (
        f"Who waited for whom, in milliseconds a step: only for a rank that came later, not for the network.{_left_out(judged, shown)}"
    )
    return Figure(svg=picture.svg(), title="Who waited for whom", caption=caption, table=table)


def _waited(place: Place, who: int) -> float:
    return place.lost.get(who, 0.0) / place.steps


def _ranks_down(picture: Picture, judged: Judged, shown: Sequence[int]) -> None:
    picture.axes.set_yticks(range(len(shown)), [name(judged, number) for number in shown])
    picture.axes.set_ylim(len(shown) - 0.4, -0.6)
    picture.axes.tick_params(axis="y", length=0)


def name(judged: Judged, number: int) -> str:
    """Short: of a row, a column."""
    return f"{'rank' if judged.mesh is None else 'replica'} {number}"


def _left_out(judged: Judged, shown: Sequence[int]) -> str:
    left = len(judged.places) - len(shown)
    return f" The {len(shown)} that were waited for most are shown, {left} are not." if left else ""
