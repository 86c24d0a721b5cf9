"""`lockstep plan TASK --methods`: compares what each training method sends in a step, how long the
step takes, and the measured values if there are any.

    S   bytes of all gradients        W   ranks, each with its own full-duplex link
    a   latency of a message          b   seconds per byte

    native, ring            every rank sends 2(W-1)/W S, in 2(W-1) messages one after the other, for
                            every bucket
    bf16, fp16, int8        the same with smaller numbers: slices to the ranks that own them, sums
                            to all ranks; int8 with a float32 for every 64 elements
    powersgd:r              rings of P [n, r] with all vectors, and of Q [m, r]; a matrix that would
                            not get smaller is sent uncompressed
    topk:s                  every rank sends 8 bytes for each of its s S/4 largest elements to every
                            other one: grows with W
    local steps             a ring of the parameters every H steps
    server                  gradients go to rank 0, parameters come back: rank 0 sends (W-1) S
    central                 rank 0 receives and sends (W-1) S, one tensor of one rank after the
                            other

simulate.py simulates the step. Assumptions: the backward passes the elements of the parameters at a
constant rate, all ranks are alike, and compression takes no time.
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
"""Methods as written on the command line of `lockstep train`. A plan and a file of measurements use
the same text.
"""
_NAMES = knobs(Parallelism).keys() - {"exact", "mesh"}


def method_of(text: str) -> Parallelism:
    """Read a method such as `--compress bf16` or `--sync-every 50 --outer nesterov`. A first word
    without dashes is a value of --reduce. Raises UsageError for any other text.
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
    """Return the work of a rank that computes its micro-batches of a step in `seconds`. Raises
    UsageError if the model has no trained parameter.

    `landed`: for each trained parameter, the share of the backward after which its gradient is
    complete; default: from the last parameter to the first.
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
    """The step of one method, as benchmarks/slow_link.py measured it."""

    sends: float | None
    """Bytes sent, as Lockstep counts them, without headers; None if only the network interface
    counted.
    """
    seconds: float
    """Mean seconds of a step."""


def read_measured(file: Path, *, task: str, workers: int, link: Link) -> dict[str, SlowLinkStep]:
    """Read the measured steps, by method. Raises UsageError if the file has another format, or if
    its task, workers or rate differ from the plan's.
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
    """A row of the comparison: one method."""

    method: str
    sends: float
    """Bytes of gradients sent in a step by the rank that sends most."""
    seconds: float
    measured: SlowLinkStep | None = None


def method_rows(
    work: RankWork, workers: int, link: Link, measured: Mapping[str, SlowLinkStep]
) -> list[MethodRow]:
    """Return rows for METHODS and for other measured methods. Raises UsageError if a measured
    method has options that a plan does not support.
    """
    found = []
    for name in dict.fromkeys(
        [*METHODS, *(name for name in measured if not name.startswith("torch DDP"))]
    ):
        step = simulate(work, workers, Network.flat(link.latency, link.bandwidth), method_of(name))
        found.append(MethodRow(name, step.sent, step.step, measured.get(name)))
    return found


def describe(found: Sequence[MethodRow]) -> str:
    """Return a table of mean step times. If "native / it" is above 1, the method is faster than an
    all-reduce of all gradients in every step, which torch's DDP also does.
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
    """Return the seconds of a step with `micro_batches` micro-batches and the optimizer, in one
    process with as many threads as each of `workers` ranks would have on this host.
    """
    side = profile(source, [1], _PROFILED, "cpu", threads=max(1, cores() // workers)).sides[0]
    return micro_batches * (side.forward + side.backward) + side.optimizer
