"""Measures the cost of an order of samples, before the first sample and per sample: Lockstep's
orders and torch's DistributedSampler, each in a new process.

Run as a module, it is one such process: `python -m lockstep.tools.bench.sampler_cost ours 1000000`
prints a Figure as JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np

from lockstep.errors import LockstepError
from lockstep.tools.timing.machine import Peak, from_proc
from lockstep.tools.timing.output_files import table as text_table

Kind = Literal["ours", "torch"]

SIZES = (10**6, 10**7, 10**8, 10**9, 10**12)
_BATCH = 4096
_BATCHES = 200
_FIRST = 1024  # indices computed first; torch's sampler is asked for one, but makes all of them
# minimum bytes per sample: int64, a list of Python integers, and copies of that list
_TORCH_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """The measurement of one process."""

    seconds: float
    """Seconds from after the imports to the first index."""
    mib: float
    """Peak growth of the resident set in this time, in MiB."""
    ns_per_index: float | None = None
    """Nanoseconds per index: median over 200 batches of 4096, spread over the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerRow:
    """The row of one number of samples. `torch` is None if it was not measured; if memory was too
    small, `note` says so.
    """

    samples: int
    ours: Figure
    torch: Figure | None = None
    note: str = ""

    @property
    def time_ratio(self) -> float | None:
        """torch's start-up time divided by Lockstep's."""
        return self.torch.seconds / self.ours.seconds if self.torch else None

    @property
    def memory_ratio(self) -> float | None:
        """torch's start-up memory divided by Lockstep's, which counts as at least one page."""
        return self.torch.mib / max(self.ours.mib, 4096 / 2**20) if self.torch else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"time_ratio": self.time_ratio, "memory_ratio": self.memory_ratio}


def rows(largest_torch: int, sizes: tuple[int, ...] = SIZES) -> Iterator[SamplerRow]:
    """Measure one size after the other. torch's sampler is measured up to `largest_torch` samples
    and the free memory. Linux only.
    """
    for samples in sizes:
        ours = in_a_process("ours", samples)
        needed, free = samples * _TORCH_BYTES, from_proc("/proc/meminfo", "MemAvailable")
        if samples > largest_torch:
            yield SamplerRow(samples=samples, ours=ours)
        elif needed > free:
            note = (
                f"torch's not measured at {samples}: it needs about {needed / 2**30:.1f} GiB, and"
                f" {free / 2**30:.1f} GiB are free"
            )
            yield SamplerRow(samples=samples, ours=ours, note=note)
        else:
            yield SamplerRow(samples=samples, ours=ours, torch=in_a_process("torch", samples))


def in_a_process(kind: Kind, samples: int) -> Figure:
    """Measure in a new process. Raises LockstepError if it fails."""
    command = [sys.executable, "-m", "lockstep.tools.bench.sampler_cost", kind, str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LockstepError(
            "sampler-measurement-failed",
            kind=kind,
            samples=samples,
            exit_code=done.returncode,
            said=said,
        )
    return Figure(**json.loads(done.stdout))


def measure(kind: Kind, samples: int) -> Figure:
    """Measure in this process, without the time of imports."""
    return _ours(samples) if kind == "ours" else _torchs(samples)


def _ours(samples: int) -> Figure:
    from lockstep.data.orders import Shuffled

    peak, start = Peak(), perf_counter()
    order = Shuffled(samples, 0)
    order.at(0, np.arange(min(_FIRST, samples), dtype=np.int64))
    seconds, mib = perf_counter() - start, peak.mib()
    batch = min(_BATCH, samples)
    times = []
    for number in range(_BATCHES):
        first = (samples - batch) * number // _BATCHES
        begun = perf_counter()
        order.at(0, np.arange(first, first + batch, dtype=np.int64))
        times.append((perf_counter() - begun) / batch * 1e9)
    return Figure(seconds=seconds, mib=mib, ns_per_index=statistics.median(times))


def _torchs(samples: int) -> Figure:
    from torch.utils.data import DistributedSampler

    dataset: Any = range(samples)  # the sampler uses only its length
    peak, start = Peak(), perf_counter()
    next(iter(DistributedSampler(dataset, num_replicas=2, rank=0)))
    return Figure(seconds=perf_counter() - start, mib=peak.mib())


def table(measured: list[SamplerRow]) -> str:
    """Return a plain-text table with a line for each size."""
    head = "samples | start-up ms | MiB | ns/index | torch's start-up s | MiB | time ratio | memory ratio"
    return "\n".join(
        [
            text_table(head, map(_cells, measured), left=()),
            *(row.note for row in measured if row.note),
        ]
    )


def _cells(row: SamplerRow) -> list[str]:
    per_index = "-" if row.ours.ns_per_index is None else f"{row.ours.ns_per_index:.1f}"
    ours = [
        f"{row.samples:.0e}".replace("+", ""),
        f"{row.ours.seconds * 1e3:.2f}",
        f"{row.ours.mib:.2f}",
        per_index,
    ]
    if row.torch is None:
        return [*ours, "-", "-", "-", "-"]
    return [
        *ours,
        f"{row.torch.seconds:.3f}",
        f"{row.torch.mib:.1f}",
        f"{row.time_ratio:.0f}",
        f"{row.memory_ratio:.0f}",
    ]


if __name__ == "__main__":
    print(
        json.dumps(asdict(measure("torch" if sys.argv[1] == "torch" else "ours", int(sys.argv[2]))))
    )
