"""Figures of time and memory by rank, and of who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    lengths_by_part = [lengths for _, lengths in parts.values()]
    lengths_by_row = zip(*lengths_by_part, strict=True)
    legend = {name: colour(phase) for name, (phase, _) in parts.items()}
    plot = Plot((0, max(map(sum, lengths_by_row))), unit, rows=rows, legend=legend)
    begins = [0.0] * len(rows)
    for name, (phase, lengths) in parts.items():
        for row, length in enumerate(lengths):
            begin = begins[row]
            end = begin + length
            begins[row] = end
            plot.bar(begin, end, row + 0.15, 0.7, colour(phase), stroke="var(--paper)")
            width = plot.x(end) - plot.x(begin)
            if width > 5 * len(name) + 4:
                plot.inscribe_small(begin, row + 0.5, name)
    return plot.inside()


def times(judged: Judged | None) -> Section:
    """Draw the time of each rank by phase. The section is empty if nothing was recorded."""
    if judged is None:
        return Section("ranks", "Time by rank")
    figures = [_phases(judged)]
    if sum(judged.lost_to.values()) > 0:
        figures.append(_waits(judged))
    steps = f"steps {judged.first} to {judged.last}"
    if judged.first == judged.last:
        steps = f"step {judged.first}"
    text = [f"Means over {steps}, without evaluations and checkpoints."]
    return Section("ranks", "Time by rank", text, figures, folded=False)


def _drawn(judged: Judged) -> dict[int, str]:
    """Return the names of the ranks or replicas that are shown, in order: all of them, or those
    that the others waited for longest.
    """
    numbers = list(judged.places)
    if len(numbers) > _MOST:
        longest_first = [number for number in judged.lost_to if number in judged.places]
        numbers = sorted(longest_first[:_MOST])
    return {number: f"{_member(judged)} {number}" for number in numbers}


def _member(judged: Judged) -> str:
    return "rank" if judged.mesh is None else "replica"


def _left_out(judged: Judged, shown: Mapping[int, str]) -> str:
    left = len(judged.places) - len(shown)
    if not left:
        return ""
    return f" Shown are the {len(shown)} that others waited for most; {left} are not."


def _phases(judged: Judged) -> Illustration:
    shown = _drawn(judged)
    bars: dict[str, tuple[str, list[float]]] = {NAMES[phase]: (phase, []) for phase in SHOWN}
    rows = []
    for number, name in shown.items():
        times = judged.places[number]
        row = [name]
        for phase, (_, lengths) in zip(SHOWN, bars.values(), strict=True):
            seconds = times.per_step(phase)
            lengths.append(1e3 * seconds)
            row.append(milliseconds(seconds))
        row.append(milliseconds(times.per_step("seconds")))
        hidden = times.hidden_per_step
        row.append("unknown" if hidden is None else milliseconds(hidden))
        rows.append(row)
    head = [_member(judged), *NAMES.values(), "step", "hidden"]
    caption = (
        "The mean step of each rank by phase, in milliseconds. Communication behind computation"
        " costs no time and is not drawn."
        f"{_left_out(judged, shown)}"
    )
    svg = _bars(list(shown.values()), "ms a step", bars)
    table = Numbers("Milliseconds a step", head, rows)
    return Illustration("A step of each rank", svg, caption, table)


def _waits(judged: Judged) -> Illustration:
    shown = _drawn(judged)
    names = list(shown.values())
    count = len(shown)
    waited = []
    for number in shown:
        times = judged.places[number]
        waited.append([times.waited_for(awaited) for awaited in shown])
    longest = max(map(max, waited)) or 1.0
    every = max(1, count // 16)
    below = {}
    for column, number in enumerate(shown):
        if column % every == 0:
            below[column + 0.5] = str(number)
    unit = "waited for this rank, ms a step"
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
    table = Numbers(head, [_member(judged), *names], rows)
    caption = (
        "How long the rank on the left waited for the rank below, in milliseconds a step. Waits for"
        " the network are left out."
        f"{_left_out(judged, shown)}"
    )
    return Illustration("Who waited for whom", plot.inside(), caption, table)


def memory(anatomy: Anatomy | None) -> Section:
    """Draw the memory of each rank, from the latest start that recorded it. The section is empty if
    none did.
    """
    memory_of = {} if anatomy is None else _latest_memory(anatomy)
    if not memory_of:
        return Section("memory", "Memory")
    numbers = sorted(memory_of)[:_MOST]
    names = [f"rank {rank}" for rank in numbers]
    bars = {}
    columns = [names]
    for part in (*_PARTS, "peak"):
        sizes = [getattr(memory_of[rank], part) for rank in numbers]
        columns.append([_mib(size) for size in sizes])
        if part in _PARTS and any(sizes):
            bars[part] = (_PARTS[part], [(size or 0) / _MIB for size in sizes])
    if not bars:
        bars["parameters"] = (_PARTS["parameters"], [0.0] * len(names))
    rows = list(zip(*columns, strict=True))
    table = Numbers("MiB", ["rank", *_PARTS, "peak"], rows)
    caption = "What each rank holds, in MiB. The peak is of the whole process, or of its GPU."
    if len(numbers) < len(memory_of):
        caption += f" Shown are the first {len(numbers)} of {len(memory_of)} ranks."
    figure = Illustration("Memory by rank", _bars(names, "MiB", bars), caption, table)
    return Section("memory", "Memory", figures=[figure])


def _latest_memory(anatomy: Anatomy) -> dict[int, MemoryLine]:
    """Return the memory of each rank in the latest start in which any rank recorded it."""
    for generation in reversed(anatomy.generations):
        lanes = generation.lanes.items()
        memory_of = {rank: lane.memory for rank, lane in lanes if lane.memory}
        if memory_of:
            return memory_of
    return {}


def _mib(size: int | None) -> str:
    if size is None:
        return "unknown"
    mib = size / _MIB
    return f"{mib:.2f}" if mib < 100 else f"{mib:,.0f}"
