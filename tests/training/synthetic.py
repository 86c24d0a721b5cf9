"""Anatomies made up: base times, noise and planted delays, from which ranks' waits follow as in
a training whose ranks meet once a step.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.training.timeline import Lane, Line, Timeline, join, parse

BASE = {
    "data": 0.004,
    "forward": 0.02,
    "backward": 0.04,
    "moving": 0.003,
    "optimizer": 0.005,
    "checks": 0.001,
    "other": 0.002,
}
Extra = Callable[[int, int, str], float]
"""(rank, step, phase) -> seconds more; phases as in BASE."""


def planted(who: int, what: str, seconds: float = 0.2) -> Extra:
    return lambda rank, step, phase: seconds if (rank, phase) == (who, what) else 0.0


def noisy(seed: int, share: float, base: Mapping[str, float] = BASE) -> Extra:
    """Up to `share` of the base time more, another in every step."""
    return lambda rank, step, phase: (
        share * base[phase] * zlib.crc32(f"{seed} {rank} {step} {phase}".encode()) / 2**32
    )


def begin(rank: int, workers: int, **changes: Any) -> dict[str, Any]:
    where = {"rank": rank, "workers": workers, "host": "anna", "node": 0, "device": "cpu"}
    batches = {"micro_batch": 8, "global_batch": 16 * workers, "buckets": [40000, 120000]}
    threads = {"loader_workers": 0, "threads": 1, "cores": 64}
    line = {"kind": "begin", "step": 0, "at": 100.0, "method": "replicated"}
    return {**line, **where, **batches, **threads, **changes}


def lines(
    workers: int,
    steps: int = 12,
    *extra: Extra,
    base: Mapping[str, float] = BASE,
    lost: bool = True,
    spans: bool = False,
    first: int = 1,
    pieces: Sequence[int] | None = None,
    **changes: Any,
) -> dict[int, list[dict[str, Any]]]:
    """By rank, as the files hold them. A rank waits until the last one has computed and sent.
    `pieces`: micro-batches of each rank.
    """
    found = {rank: [begin(rank, workers, step=first - 1, **changes)] for rank in range(workers)}
    clock = {rank: 100.0 for rank in range(workers)}
    for step in range(first, first + steps):
        taken = {
            rank: {
                phase: base[phase] + sum(more(rank, step, phase) for more in extra)
                for phase in BASE
            }
            for rank in range(workers)
        }
        arrives = {rank: clock[rank] + sum(each.values()) for rank, each in taken.items()}
        latest = max(arrives, key=lambda rank: arrives[rank])
        for rank, each in taken.items():
            waits = arrives[latest] - arrives[rank]
            line = {
                "kind": "steps",
                "first": step,
                "last": step,
                **each,
                "seconds": sum(each.values()) + waits,
                "hidden": 0.001,
                "waits": waits,
                "exposed": each["moving"] + waits,
                "samples": 16,
                "micro_batches": 2 if pieces is None else pieces[rank],
            }
            if lost and rank != latest:
                line["lost"] = {str(latest): waits}
            if spans:
                line |= _spans(clock[rank], line)
            found[rank].append(line)
            clock[rank] = arrives[latest]
    return found


def _spans(at: float, line: Mapping[str, Any]) -> dict[str, Any]:
    spans, began = [], at
    for phase in ("data", "forward", "backward", "moving", "waits", "optimizer", "checks", "other"):
        spans.append([phase, began, began + line[phase]])
        began += line[phase]
    backward = spans[2]
    return {
        "spans": spans,
        "buckets": [[0, backward[1], backward[2]], [1, backward[2], spans[4][2]]],
    }


def anatomy(found: Mapping[int, Iterable[Mapping[str, Any]]]) -> Timeline:
    """Without files."""
    lanes: dict[int, list[Lane]] = {}
    for rank, each in found.items():
        parsed: list[Line] = [line for one in each if (line := parse(json.dumps(one))) is not None]
        starts = [place for place, one in enumerate(each) if one["kind"] == "begin"]
        for start, end in zip(starts, [*starts[1:], len(parsed)], strict=True):
            lanes.setdefault(rank, []).append(Lane.of(parsed[start], parsed[start + 1 : end]))  # type: ignore[arg-type]
    return Timeline(starts=join(lanes), unread={})


def write(run: Path, found: Mapping[int, Iterable[Mapping[str, Any]]]) -> Path:
    """As files of a run directory."""
    (run / "anatomy").mkdir(parents=True, exist_ok=True)
    for rank, each in found.items():
        with (run / "anatomy" / f"rank-{rank}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in each)
    return run
