"""What happened on the way: starts and restarts, events, checkpoints, evaluations; and what our
own checks cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoints.folders import best_name, step_of, written
from lockstep.tools.recorded import Recorded
from lockstep.tools.report.html import Numbers, Section
from lockstep.tools.report.judged import Judged, milliseconds, ranks
from lockstep.training.timeline.lanes import Anatomy, Generation

_ROWS = 50
_MIB = 2**20


def history(recorded: Recorded) -> Section:
    """Of the run."""
    tables = [
        table
        for table in (_generations(recorded), _events(recorded), _checkpoints(recorded.run))
        if table.rows
    ]
    return Section("history", "Starts, restarts, checkpoints", tables=tables)


def checks(recorded: Recorded, judged: Judged | None) -> Section:
    """What our own checks and this record cost, and what they found."""
    text = []
    if judged is not None:
        times = [place.each("checks") for place in judged.places.values()]
        share = judged.total("checks") / judged.seconds
        least, most = milliseconds(min(times)), milliseconds(max(times))
        each = least if least == most else f"{least} to {most}"
        text.append(
            f"Lockstep's own checks took {each} ms a step, {100 * share:.1f} % of the ranks' time."
        )
    skipped = sum(event["event"] == "step skipped" for event in recorded.events)
    if skipped:
        text.append(
            f"{skipped} step{'s were' if skipped > 1 else ' was'} skipped: the reasons are among"
            " the events above."
        )
    return Section("checks", "What checks cost", text)


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
    for number, each in enumerate(anatomy.generations, 1):
        hosts = list(dict.fromkeys(lane.begin.host for lane in each.lanes.values()))
        steps = f"{each.step + 1} to {each.last}" if each.last > each.step else "none"
        pauses = [f"{each.paused(what):.1f} s" for what in ("evaluate", "checkpoint")]
        latest = number == len(anatomy.generations)
        yield [
            str(number),
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
        return f"as it should{missing}"
    return f"{'under way' if under_way else f'without a word of {ranks(killed)}'}{missing}"


def _events(recorded: Recorded) -> Numbers:
    """The latest, in order; starts and ends of the training are the first and the last."""
    found = recorded.events[-_ROWS:]
    left = len(recorded.events) - len(found)
    rows = [[str(event["event"]), str(event.get("step", "")), _line(event)] for event in found]
    caption = f"Events{f'; {left} earlier ones are in metrics.jsonl' if left else ''}"
    return Numbers(caption, ["event", "step", ""], rows)


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
            continue  # the run is under way, and has removed it meanwhile
        rows.append(
            [
                folder.name,
                str(step_of(folder)),
                f"{size / _MIB:.2f} MiB",
                "best" if folder.name == best else "",
            ]
        )
    return Numbers("Checkpoints that are kept", ["checkpoint", "step", "size", ""], rows)
