"""Figures of time and memory by rank, and of who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.judged import Judged, milliseconds
from lockstep.tools.svg import Plot
from lockstep.training.timeline import Anatomy, MemoryLine

SHOWN = ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other")
"""The phases in the page's order; style.css has a colour for each."""
NAMES = {phase: phase for phase in SHOWN} | {"moving": "all-reduce", "waits": "waiting"}
_MOST = 32
"""The largest number of ranks in one figure."""
_NUMBERED = 8
"""The largest number of ranks for which the cells of the matrix show numbers."""
_PARTS = dict(parameters="forward", gradients="backward", optimizer="optimizer")
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
