"""RUN/anatomy/rank-R.jsonl: where the time of every step went. Each rank writes its own file, and
`lockstep report` reads all of them.

begin    a rank starts or restarts: workers, host, step, and how it trains; `at` is the time on its
         monotonic clock
steps    sums over the steps first .. last, in seconds: data, forward, backward, exposed (= moving +
         waits), hidden, optimizer, checks, other;
         `lost`: the part of the waits that a later rank caused, by that rank's number;
         spans and buckets, for some steps: when each piece began and ended
pause    evaluate or checkpoint, between steps
memory   bytes of parameters, gradients, optimizer; peak
end      the training ended

Each of the first 1000 lines covers one step, each of the next 1000 two steps, then 4, 8, ... So a
file grows with the logarithm of the number of steps, and all ranks' lines end at the same steps.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.data.windows import Window
from lockstep.gradients.bucket import BucketTimes
from lockstep.runtime.binding import host_cores
from lockstep.runtime.step_clock import StepTimes
from lockstep.step.step_result import StepResult
from lockstep.step.stepper import Stepper
from lockstep.training.metrics import TelemetryFile
from lockstep.training.timeline import FOLDER


def memory_use(stepper: Stepper) -> dict[str, int | None]:
    """Return bytes of memory on this rank; for a sharded optimizer, of this rank's share. `peak`:
    the most that the process, or its GPU, has held so far.
    """
    return {
        "parameters": sum(parameter.nbytes for parameter in stepper.model.parameters()),
        "gradients": sum(bucket.sum.nbytes for bucket in stepper.reducer.buckets),
        "optimizer": sum(tensor.nbytes for tensor in _tensors(dict(stepper.optimizer.state))),
        "peak": _peak(stepper.world.device),
    }


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return None
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


_LINES = 1000
_IN_DETAIL = 20  # first steps with spans and buckets; then one in _RARELY, up to _LINES
_RARELY = 100
_DIGITS = 7
_FLUSH_EVERY = 1.0  # s: a killed rank loses about this much
_encoded = json.JSONEncoder(allow_nan=False).encode
_NAMES = {"reduce": "moving", "loop": "other", "start": "other"}  # phase -> its name in the sums
_SUMMED = (
    "seconds",
    "data",
    "forward",
    "backward",
    "exposed",
    "moving",
    "waits",
    "hidden",
    "optimizer",
    "checks",
    "other",
)


def ends_line(step: int) -> bool:
    """Whether a line ends with step `step`, counted from 1 since the rank began."""
    width = 1
    before = 0
    while step > before + _LINES * width:
        before += _LINES * width
        width *= 2
    return (step - before) % width == 0


def in_detail(step: int) -> bool:
    """Whether the line that ends with `step`, counted from 1 since the rank began, has spans and
    buckets.
    """
    return step <= _IN_DETAIL or (step <= _LINES and step % _RARELY == 0)


def begins(
    stepper: Stepper, *, micro_batch: int | None, global_batch: int | None, loader_workers: int
) -> dict[str, Any]:
    """Return the fields of a rank's first line that say how it trains."""
    world = stepper.world
    return {
        "workers": world.size,
        "host": socket.gethostname(),
        "node": world.node,
        "device": world.device.type,
        "method": stepper.method.describe(),
        "buckets": [bucket.sum.nbytes for bucket in stepper.reducer.buckets],
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "loader_workers": loader_workers,
        "threads": torch.get_num_threads(),
        "cores": host_cores(),
    }


def starts(run: Path) -> int:
    """Return how many times rank 0 has started training in this run directory."""
    file = run / FOLDER / "rank-0.jsonl"
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(line.startswith(b'{"kind": "begin"') for line in lines)


class AnatomyFile:
    """This rank's anatomy file, from the stepper's next step on. `begin`: the fields of its first
    line besides rank and step.
    """

    def __init__(self, run: Path, stepper: Stepper, begin: Mapping[str, Any]) -> None:
        world = stepper.world
        self._stepper = stepper
        self._lines = _opened(run / FOLDER / f"rank-{world.rank}.jsonl")
        self._flush_due = 0.0
        self._before = stepper.steps
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._lost: defaultdict[int, float] = defaultdict(float)
        self._count = 0  # steps in finished lines and in the open line
        # The first and the latest step of the open line.
        self._open: list[_TimedStep] = []
        self._pending: list[_TimedStep] = []  # steps for which the last rank is not known yet
        self.write(
            {
                "kind": "begin",
                "rank": world.rank,
                "step": stepper.steps,
                "at": time.monotonic(),
                **begin,
            }
        )
        stepper.clock.keeps_spans = lambda step: in_detail(step - self._before)

    def step(self, result: StepResult, window: Window) -> None:
        """Record one step over this window."""
        if self._pending and self._count == 0:  # the optimizer has its state by now
            self._write_memory()
        lost = _lost(result.waited_by_rank, self._stepper.facts_rank)
        for step in self._pending:
            self._add(step, lost if step is self._pending[-1] else {})
        buckets: Sequence[BucketTimes] = ()
        # On a GPU, `result.times` are those of earlier steps than the bucket times.
        if self._stepper.world.device.type != "cuda":
            buckets = self._stepper.reducer.timeline.times()
        self._pending = [
            _TimedStep(times, len(window), window.samples, buckets) for times in result.times
        ]
        for times in result.times:
            self._write_pause("evaluate", times.step - 1, times.evaluate)
            self._write_pause("checkpoint", times.step - 1, times.checkpoint)

    def write(self, record: Mapping[str, Any]) -> None:
        self._lines.write(f"{_encoded(record)}\n".encode())
        now = time.monotonic()
        if now > self._flush_due:
            self._lines.flush()
            self._flush_due = now + _FLUSH_EVERY

    def end(self, step: int) -> None:
        """Write the last lines of a rank that ends normally, after `step` steps."""
        self._flush()
        for kind, seconds in self._stepper.clock.running.paused().items():
            self._write_pause(kind, step, seconds)
        self._write_memory()
        self.write({"kind": "end", "step": step})

    def _write_pause(self, kind: str, step: int, seconds: float) -> None:
        if seconds:
            self.write({"kind": "pause", "what": kind, "step": step, "seconds": _rounded(seconds)})

    def _write_memory(self) -> None:
        self.write({"kind": "memory", **memory_use(self._stepper)})

    def close(self) -> None:
        self._flush()
        self._lines.close()

    def __enter__(self) -> AnatomyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, step: _TimedStep, lost: Mapping[int, float]) -> None:
        self._open = [*self._open[:1], step]
        for name in _SUMMED:
            self._sums[name] += getattr(step.times, name) or 0.0
        self._sums["micro_batches"] += step.micro_batches
        self._sums["samples"] += step.samples
        for rank, seconds in lost.items():
            self._lost[rank] += seconds
        self._count += 1
        if ends_line(self._count):
            self._end_line()

    def _end_line(self) -> None:
        first = self._open[0].times
        latest = self._open[-1].times
        record: dict[str, Any] = {"kind": "steps", "first": first.step, "last": latest.step}
        record |= {name: _rounded(self._sums[name]) for name in _SUMMED}
        record |= {name: round(self._sums[name]) for name in ("micro_batches", "samples")}
        if latest.hidden is None:
            record["hidden"] = None
        if self._lost:
            lost = sorted(self._lost.items())
            record["lost"] = {str(rank): _rounded(seconds) for rank, seconds in lost}
        if len(self._open) == 1 and latest.spans and in_detail(latest.step - self._before):
            record |= self._open[0].detail()
        self.write(record)
        self._sums.clear()
        self._lost.clear()
        self._open = []

    def _flush(self) -> None:
        """Write what is not written yet, as if a line ended here."""
        for step in self._pending:
            self._add(step, {})
        self._pending = []
        if self._open:
            self._end_line()


@dataclass(frozen=True, slots=True)
class _TimedStep:
    times: StepTimes
    micro_batches: int
    samples: int
    buckets: Sequence[BucketTimes]

    def detail(self) -> dict[str, Any]:
        """Return when each piece of the step began and ended, and when each bucket left and
        arrived, on this process's monotonic clock.
        """
        spans = []
        for span in self.times.spans:
            if span.end > span.begin:
                name = "waits" if span.waits else _NAMES.get(span.phase, span.phase)
                spans.append([name, _rounded(span.begin), _rounded(span.end)])
        buckets = []
        for number, bucket in enumerate(self.buckets):
            arrived = None if bucket.arrived is None else _rounded(bucket.arrived)
            buckets.append([number, _rounded(bucket.left), arrived])
        return {"spans": spans, "buckets": buckets}


def _lost(waited_by_rank: Sequence[float], rank: int) -> Mapping[int, float]:
    """Return {last rank: seconds that this rank waited for it}. The rank that waited least came
    last. Its own wait was for the network, so an equal part of this rank's wait was too.
    """
    if len(waited_by_rank) < 2:
        return {}
    least = min(waited_by_rank)
    last = waited_by_rank.index(least)
    lost = waited_by_rank[rank] - least
    return {last: lost} if lost > 0 else {}


def _rounded(seconds: float) -> float:
    return round(seconds, _DIGITS)


def _opened(file: Path) -> TelemetryFile:
    """Open `file` to append lines. A killed rank may have left an incomplete line."""
    torn = file.exists() and not file.read_bytes().endswith(b"\n")
    lines = TelemetryFile(file)
    if torn:
        lines.write(b"\n")
    return lines
