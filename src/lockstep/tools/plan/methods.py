"""`lockstep plan TASK --methods`: what each way to train sends in a step, and how long the step
takes, beside each other and what was measured.

    S   bytes of all gradients        W   ranks, each with a link of its own that sends and receives at once
    a   latency of a message          b   seconds per byte

    native, ring            every rank sends 2(W-1)/W S, in 2(W-1) messages one after the other, for
                            every bucket
    bf16, fp16, int8        the same in smaller numbers: slices to their owners, sums to everybody;
                            int8 with a float32 for every 64 elements
    powersgd:r              rings of P [n, r] with all vectors, and of Q [m, r]; a matrix that would
                            not get smaller travels whole
    topk:s                  every rank sends 8 bytes for each of its s S/4 largest elements to every
                            other one: grows with W
    local steps             a ring of the parameters every H steps
    server                  every rank owns S/W: gradients go to the owners, parameters come back;
                            2(W-1)/W S
    central                 rank 0 receives and sends (W-1) S, one tensor of one rank after the
                            other

It is the step of simulate.py: a bucket is complete when the backward has come through as large a
share of the elements, all ranks are alike, and compressing costs nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.collectives.network import Link, Network
from lockstep.config.knob import knobs
from lockstep.config.parallelism import Parallelism
from lockstep.config.task import Task
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores
from lockstep.tools.plan.networks import TCP, bits_per_second
from lockstep.tools.plan.simulate import simulate
from lockstep.tools.plan.work import BACKWARD, RankWork
from lockstep.tools.timing.output_files import megabytes, milliseconds, reading, table
from lockstep.tools.timing.profile import laid_out
from lockstep.tools.timing.profiler import profile

REFERENCE = "native"
_PROFILED = 1.0  # seconds
METHODS = (
    REFERENCE,
    "--compress bf16",
    "--compress fp16",
    "--compress int8",
    "--compress powersgd:4",
    "--compress topk:0.01",
    "--sync-every 10",
    "--sync-every 5 --compress int8",
    "--sync-every 50",
    "--sync-every 500",
    "--sync-every 500 --outer nesterov",
    "--update server",
    "ring",
    "central",
)
"""As they are written on the command line of `lockstep train`: the same text in a plan and in
what was measured.
"""
_NAMES = knobs(Parallelism).keys() - {"exact", "mesh"}


def method_of(text: str) -> Parallelism:
    """`--compress bf16`, `--sync-every 50 --outer nesterov`; a bare word is a way to sum. Raises
    UsageError.
    """
    words = shlex.split(text)
    if words and not words[0].startswith("-"):
        words = ["--reduce", *words]
    given: dict[str, Any] = {
        option.removeprefix("--").replace("-", "_"): value
        for option, value in zip(words[::2], words[1::2], strict=False)
    }
    if len(words) % 2 or not words or not set(given) <= _NAMES:
        raise UsageError("unknown-method", text=text)
    if given.get("sync_every", "").isdigit():
        given["sync_every"] = int(given["sync_every"])
    return Parallelism(**given)


def work_of_module(
    model: nn.Module, *, seconds: float = 0.0, micro_batches: int = 1, landed: Sequence[float] = ()
) -> RankWork:
    """Of a rank that takes so many seconds for its micro-batches of a step. Raises UsageError where
    no parameter is trained.

    `landed`: by trained parameter, the share of the backward after which its gradient was there;
    default: from the last to the first.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise UsageError("not-trained", model=type(model).__name__)
    each = seconds / micro_batches
    return RankWork(
        forward=(1 - BACKWARD) * each,
        backward=BACKWARD * each,
        micro_batches=micro_batches,
        buckets=laid_out(trained, landed),
        width=sum(each.nbytes for each in trained) / max(1, sum(each.numel() for each in trained)),
    )


@dataclass(frozen=True, slots=True)
class SlowLinkStep:
    """A step of one method, as benchmarks/slow_link.py measured it."""

    sends: float | None
    """Bytes: Lockstep's own count, without headers; None where only the interface counted."""
    seconds: float
    """On the mean."""


def read_measured(file: Path, *, task: str, workers: int, link: Link) -> dict[str, SlowLinkStep]:
    """By method. Raises UsageError for another file, and where something else was measured than
    is planned.
    """
    with reading(file, "--measured", "benchmarks/slow_link.py --json") as found:
        rows = {row["method"]: row for row in found["rows"] if row.get("problem") is None}
        named, count, rate = found["task"], int(found["workers"]), str(found["rate"])
        measured = {
            name: SlowLinkStep(row["counted"], float(row["mean"])) for name, row in rows.items()
        }
    bytes_per_s = TCP * (bits_per_second(rate) or 0.0) / 8
    if (named, count) != (task, workers) or abs(
        bytes_per_s - link.bandwidth
    ) > 0.01 * link.bandwidth:
        raise UsageError(
            "measured-something-else",
            file=str(file),
            found=f"{named} with {count} workers at {rate}",
            planned=f"{task} with {workers} workers at {link.bandwidth * 8 / TCP / 1e6:g} Mbit/s",
        )
    return measured


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method."""

    method: str
    sends: float
    """Bytes of gradients that each rank, or the one that sends most, sends in a step."""
    seconds: float
    measured: SlowLinkStep | None = None


def method_rows(
    work: RankWork, workers: int, link: Link, measured: Mapping[str, SlowLinkStep]
) -> list[MethodRow]:
    """The usual methods, and those that were measured beside them. Raises UsageError for a
    measured one with options that no plan knows.
    """
    found = []
    for name in dict.fromkeys(
        [*METHODS, *(name for name in measured if not name.startswith("torch DDP"))]
    ):
        step = simulate(work, workers, Network.flat(link.latency, link.bandwidth), method_of(name))
        found.append(MethodRow(name, step.sent, step.step, measured.get(name)))
    return found


def describe(found: Sequence[MethodRow]) -> str:
    """Times are of a step, on the mean; "native / it" above 1 is quicker than the sum of
    everything in every step, which is torch's DDP too.
    """
    head = ["method", "sent a step", "a step", "native / it"]
    if any(row.measured for row in found):
        head += ["measured: sent", "a step", "native / it"]
    return table(head, [_cells(row, found[0]) for row in found])


def _cells(row: MethodRow, native: MethodRow) -> list[str]:
    cells = [
        row.method,
        megabytes(row.sends),
        milliseconds(row.seconds),
        f"{native.seconds / row.seconds:.2f}",
    ]
    if row.measured is None:
        return cells
    ratio = f"{native.measured.seconds / row.measured.seconds:.2f}" if native.measured else ""
    sent = "" if row.measured.sends is None else megabytes(row.measured.sends)
    return [*cells, sent, milliseconds(row.measured.seconds), ratio]


def as_json(found: Sequence[MethodRow]) -> list[dict[str, Any]]:
    return [
        {
            "method": row.method,
            "bytes_sent": row.sends,
            "seconds": row.seconds,
            "speedup": found[0].seconds / row.seconds,
            "measured_bytes_sent": row.measured and row.measured.sends,
            "measured_seconds": row.measured and row.measured.seconds,
        }
        for row in found
    ]


def step_seconds(source: Callable[[], Task], micro_batches: int, workers: int) -> float:
    """A step of so many micro-batches with the optimizer's, in one process, with the threads
    that each of so many ranks would have on this host.
    """
    side = profile(source, [1], _PROFILED, "cpu", threads=max(1, cores() // workers)).sides[0]
    return micro_batches * (side.forward + side.backward) + side.optimizer
