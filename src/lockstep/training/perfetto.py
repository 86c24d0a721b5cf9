"""RUN/timeline.json: steps, phases and buckets of every rank for Perfetto (ui.perfetto.dev) and
chrome://tracing.

The file is in the trace-event format, an object with `traceEvents`. Times are in microseconds from
the first event. A rank is a process of the trace, with lanes for its phases and for its buckets.
Complete events of one lane must nest, so events that overlap in part are on different lanes.

Clocks of several hosts differ. They are aligned by the moment at which a step's sums arrive, which
is the same on all ranks except for the time of the transfer.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.runtime.disk import write_whole
from lockstep.training.timeline import Lane, StepsLine, Timeline

FILE = "timeline.json"
_PHASES = 1
_BUCKETS = 2
"""Numbers of the first lanes. Further phases are on odd lanes, further buckets on even ones."""
Event = dict[str, Any]


def trace(anatomy: Timeline) -> dict[str, Any]:
    """Return the contents of the file; no events if no step was recorded with spans."""
    by_host = offsets(anatomy)
    origin = min((began + by_host[host] for host, began in _beginnings(anatomy)), default=0.0)
    events: list[Event] = []
    hosts: dict[int, str] = {}
    for number, generation in enumerate(anatomy.starts):
        for rank, lane in generation.lanes.items():
            hosts.setdefault(rank, lane.begin.host)
            events += _of_lane(rank, lane, number, by_host[lane.begin.host] - origin)
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    _assign_lanes(events)
    return {"traceEvents": [*_names(hosts, events), *events], "displayTimeUnit": "ms"}


def write(run: Path, anatomy: Timeline) -> Path:
    """Write the trace of `anatomy` to timeline.json in `run`; return the file. Raises OSError."""
    file = run / FILE
    write_whole(file, json.dumps(trace(anatomy), separators=(",", ":")) + "\n")
    return file


def offsets(anatomy: Timeline) -> dict[str, float]:
    """Return the seconds to add to each host's clock to get the first host's: the median over the
    steps that both recorded.
    """
    arrived: dict[str, dict[tuple[int, int], float]] = {}  # the latest arrival at a rank of a host
    for number, generation in enumerate(anatomy.starts):
        for lane in generation.lanes.values():
            of_host = arrived.setdefault(lane.begin.host, {})
            for line in lane.steps:
                moment = summed_at(line)
                if moment is not None:
                    step = number, line.first
                    of_host[step] = max(moment, of_host.get(step, moment))
    result: dict[str, float] = {}
    for host, moments in arrived.items():
        first = next(iter(arrived.values()))
        differences = [first[step] - moments[step] for step in first.keys() & moments.keys()]
        if differences:
            result[host] = statistics.median(differences)
        else:
            result[host] = _offset_at_start(anatomy, host)
    return result


def summed_at(line: StepsLine) -> float | None:
    """Return when the sums of a step arrived, on its rank's clock: the arrival of the last bucket,
    else the end of the last communication.
    """
    ends = [done for _, _, done in line.buckets if done is not None]
    if not ends:
        ends = [ended for phase, _, ended in line.spans if phase in ("moving", "waits")]
    return max(ends, default=None)


def _offset_at_start(anatomy: Timeline, host: str) -> float:
    """Estimate an offset without common steps: ranks of one generation start at about one time."""
    for generation in anatomy.starts:
        starts = [lane.begin.at for lane in generation.lanes.values() if lane.begin.host == host]
        if starts and generation.begin.host != host:
            return generation.begin.at - min(starts)
    return 0.0


def _beginnings(anatomy: Timeline) -> Iterator[tuple[str, float]]:
    """Yield (host, begin) of each span and bucket, on the host's clock."""
    for generation in anatomy.starts:
        for lane in generation.lanes.values():
            for line in lane.steps:
                for _, began, _ in (*line.spans, *line.buckets):
                    yield lane.begin.host, began


def _of_lane(rank: int, lane: Lane, generation: int, offset: float) -> Iterator[Event]:
    def event(
        first_lane: int, name: str, kind: str, began: float, ended: float, **facts: int
    ) -> Event:
        """Round both ends to microseconds, so that events that touch still do."""
        start = round(1e6 * (began + offset))
        end = round(1e6 * (ended + offset))
        return {
            "ph": "X",
            "pid": rank,
            "tid": first_lane,
            "name": name,
            "cat": kind,
            "ts": start,
            "dur": max(0, end - start),
            "args": facts,
        }

    sizes = dict(enumerate(lane.begin.buckets))
    for line in lane.steps:
        step = line.first
        if line.spans:
            yield event(
                _PHASES,
                f"step {step}",
                "step",
                min(began for _, began, _ in line.spans),
                max(ended for _, _, ended in line.spans),
                step=step,
                generation=generation,
                samples=line.samples,
                micro_batches=line.micro_batches,
            )
        for phase, began, ended in line.spans:
            yield event(_PHASES, phase, "phase", began, ended, step=step)
        for index, left, done in line.buckets:
            if done is not None:
                size = {"bytes": sizes[index]} if index in sizes else {}
                yield event(_BUCKETS, f"bucket {index}", "bucket", left, done, step=step, **size)


def _assign_lanes(events: Iterable[Event]) -> None:
    """Put each event on the first lane of its kind where it lies beside the others or within one.
    `events` are in order of time.
    """
    open_until: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        while not _fits(open_until[event["pid"], event["tid"]], event):
            event["tid"] += 2  # phases in odd lanes, buckets in even ones
        open_until[event["pid"], event["tid"]].append(event["ts"] + event["dur"])


def _fits(ends: list[int], event: Event) -> bool:
    """Whether `event` starts after the open events end, or lies within the innermost. `ends`: the
    ends of the open events, the innermost last.
    """
    while ends and ends[-1] <= event["ts"]:
        ends.pop()
    return not ends or event["ts"] + event["dur"] <= ends[-1]


def _names(hosts: Mapping[int, str], events: Sequence[Event]) -> Iterator[Event]:
    """Yield the names and the order of processes and lanes, for viewers."""

    def metadata(rank: int, lane: int, key: str, **values: Any) -> Event:
        return {"ph": "M", "pid": rank, "tid": lane, "name": key, "args": values}

    for rank, host in sorted(hosts.items()):
        yield metadata(rank, 0, "process_name", name=f"rank {rank} ({host})")
        yield metadata(rank, 0, "process_sort_index", sort_index=rank)
    for rank, lane in sorted({(event["pid"], event["tid"]) for event in events}):
        name = "phases" if lane % 2 else "buckets"
        if lane > _BUCKETS:
            name += f" {(lane + 1) // 2}"
        yield metadata(rank, lane, "thread_name", name=name)
        yield metadata(rank, lane, "thread_sort_index", sort_index=lane)
