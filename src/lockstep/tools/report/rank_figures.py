"""A bar a rank: where its time goes and what its memory holds; and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lockstep.tools.report.html import Illustration, Numbers, Section
from lockstep.tools.report.judged import Judged, milliseconds
from lockstep.tools.svg import Plot
from lockstep.training.timeline.lanes import Anatomy
from lockstep.training.timeline.lines import MemoryLine

SHOWN = ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other")
"""Phases in the page's order, each a colour of style.css."""
NAMES = {phase: phase for phase in SHOWN} | {"moving": "sending, adding", "waits": "waiting"}
_MOST = 32
"""Ranks in one figure."""
_NUMBERED = 8
"""Ranks up to which a matrix has its figures written into its cells."""
_PARTS = dict(parameters="forward", gradients="backward", optimizer="optimizer", activations="data")
"""Parts of memory, and the phase whose colour each has."""
_MIB = 2**20


def colour(phase: str) -> str:
    return f"var(--{phase})"


def _bars(rows: Sequence[str], unit: str, parts: Mapping[str, tuple[str, Sequence[float]]]) -> str:
    """A bar a row, of parts that lie one behind the other: by name, the phase whose colour each
    has and its length in every row.
    """
    longest = max(map(sum, zip(*(lengths for _, lengths in parts.values()), strict=True)))
    legend = {name: colour(phase) for name, (phase, _) in parts.items()}
    plot = Plot((0, longest), unit, rows=rows, legend=legend)
    begins = [0.0] * len(rows)
    for phase, lengths in parts.values():
        for row, length in enumerate(lengths):
            plot.bar(begins[row], begins[row] + length, row + 0.15, 0.7, colour(phase))
            begins[row] += length
    return plot.inside()


def times(judged: Judged | None) -> Section:
    """Empty where nothing was recorded."""
    if judged is None:
        return Section("ranks", "Where the time went")
    figures = [_phases(judged)]
    if sum(judged.lost_to.values()) > 0:
        figures.append(_waits(judged))
    one, several = f"step {judged.first}", f"steps {judged.first} to {judged.last}"
    over = one if judged.first == judged.last else several
    left_out = "the first steps warm up and are left out, as are evaluations and checkpoints."
    text = [f"Means over {over} of one stretch; {left_out}"]
    return Section("ranks", "Where the time went", text, figures)


def _chosen(judged: Judged) -> dict[int, str]:
    """The places that are shown, in order, with their names: all, or those that were waited for
    most.
    """
    numbers = list(judged.places)
    if len(numbers) > _MOST:
        numbers = sorted([number for number in judged.lost_to if number in judged.places][:_MOST])
    what = "rank" if judged.mesh is None else "replica"
    return {number: f"{what} {number}" for number in numbers}


def _left_out(judged: Judged, shown: Mapping[int, str]) -> str:
    left = len(judged.places) - len(shown)
    return f" The {len(shown)} that were waited for most are shown, {left} are not." if left else ""


def _phases(judged: Judged) -> Illustration:
    shown = _chosen(judged)
    places = [judged.places[number] for number in shown]
    each = {phase: [place.each(phase) for place in places] for phase in (*SHOWN, "seconds")}
    bars = {NAMES[phase]: (phase, [1e3 * time for time in each[phase]]) for phase in SHOWN}
    columns: list[Sequence[float | None]] = [
        *each.values(),
        [place.hidden_each for place in places],
    ]
    rows = [list(map(_milliseconds, row)) for row in zip(*columns, strict=True)]
    table = Numbers(
        "Milliseconds a step", ["", *NAMES.values(), "step", "hidden"], _named(shown.values(), rows)
    )
    caption = (
        "Mean step of each rank by phase, in milliseconds. Communication that went on behind the"
        " computation is in no bar; what was not hidden is sending, adding, and"
        f" waiting.{_left_out(judged, shown)}"
    )
    return Illustration("Step anatomy", _bars([*shown.values()], "ms a step", bars), caption, table)


def _named(names: Iterable[str], rows: Iterable[Iterable[str]]) -> list[list[str]]:
    return [[name, *row] for name, row in zip(names, rows, strict=True)]


def _milliseconds(seconds: float | None) -> str:
    return "not known" if seconds is None else milliseconds(seconds)


def _waits(judged: Judged) -> Illustration:
    shown = _chosen(judged)
    names, count = list(shown.values()), len(shown)
    waited = [[judged.places[row].waited_for(column) for column in shown] for row in shown]
    most = max(map(max, waited)) or 1.0
    below = {
        place + 0.5: str(number)
        for place, number in enumerate(shown)
        if place % max(1, count // 16) == 0
    }
    unit = "was waited for by the rank on the left, ms a step"
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
    table = Numbers("Milliseconds a step that the row waited for the column", ["", *names], rows)
    what = (
        "Who waited for whom, in milliseconds a step: only for a rank that came later, not for the"
        " network."
    )
    return Illustration(
        "Who waited for whom", plot.inside(), what + _left_out(judged, shown), table
    )


def memory(anatomy: Anatomy | None) -> Section:
    """Of the latest stretch in which a rank has told. Empty where none has."""
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
    table = Numbers("MiB", ["", *size_of], _named(shown, rows))
    more = f" The first {len(shown)} of {len(found)} ranks." if len(found) > len(shown) else ""
    caption = (
        "What each rank holds, in MiB. A part that the device does not tell is not drawn; peak is"
        f" of the whole process or device.{more}"
    )
    return Section(
        "memory", "Memory", figures=[Illustration("Memory by rank", svg, caption, table)]
    )


def _mib(size: int | None) -> str:
    if size is None:
        return "not known"
    return f"{size / _MIB:.2f}" if size < 100 * _MIB else f"{size / _MIB:,.0f}"
