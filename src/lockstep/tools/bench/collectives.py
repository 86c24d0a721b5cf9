"""Times collectives on this host: each algorithm and the backend's own, in turns. The result of
every timed run is checked.

Columns and definitions are those of nccl-tests. `size` is the bytes of the tensor that every rank
ends with (all-gather: of all pieces together; reduce-scatter: of each input). `time` is that of the
slowest rank, median over the runs. algbw = size / time. busbw = algbw times a factor, so that an
ideal ring has the speed of the link at any number of ranks (2(n-1)/n for an all-reduce). busbw is
computed from the time; no traffic is measured. `#wrong` counts wrong elements over all runs and
ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep import World, collectives, init, launch
from lockstep.tools.timing.in_turns import take_turns
from lockstep.tools.timing.output_files import table as text_table

KINDS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
_WORTH = 0.25  # approximate seconds to measure one size of one algorithm
_FEWEST, _MOST = 8, 200  # runs


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """The time of one algorithm at one size."""

    collective: str
    algorithm: str
    size: int
    workers: int
    runs: int
    p50: float
    """Seconds, of the slowest rank of each run; as `p99`."""
    p99: float
    wrong: int

    @property
    def algbw(self) -> float:
        """Size of the tensor divided by the time, in GB/s."""
        return self.size / self.p50 / 1e9

    @property
    def busbw(self) -> float:
        """Bandwidth that the links must have had, in GB/s."""
        return self.algbw * bus_factor(self.collective, self.workers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"algbw": self.algbw, "busbw": self.busbw}


def bus_factor(collective: str, workers: int) -> float:
    """Return busbw / algbw, as nccl-tests define it."""
    if collective == "all_reduce":
        return 2 * (workers - 1) / workers
    return 1.0 if collective in ("broadcast", "reduce") else (workers - 1) / workers


def measure(
    kind: str,
    workers: int,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    runs: int | None = None,
) -> list[CollectiveTime]:
    """Measure on `workers` new ranks of this host.

    Args:
        kind: one of KINDS.
        workers: the number of ranks.
        sizes: bytes of the tensors.
        algorithms: names of algorithms of this collective.
        runs: timed runs. None: as many as fit in a quarter of a second.
    """
    return launch(_on_rank, workers=workers, args=(kind, tuple(sizes), tuple(algorithms), runs))[0]


def _on_rank(
    kind: str, sizes: Sequence[int], algorithms: Sequence[str], runs: int | None
) -> list[CollectiveTime]:
    rows: list[CollectiveTime] = []
    with init() as world:
        for size in sizes:
            rows += _one_size(world, kind, size, algorithms, runs)
    return rows


def _one_size(
    world: World, kind: str, size: int, algorithms: Sequence[str], runs: int | None
) -> list[CollectiveTime]:
    case = _Case(world, kind, size)
    ways = {algorithm: partial(case.run, algorithm) for algorithm in algorithms}
    warm_up = take_turns(ways, 2, world, warm_up=0, prepare=case.prepare)
    case.check()
    case.wrong.clear()
    worthwhile = int(_WORTH / max(warm_up[algorithms[0]][-1], 1e-6))
    count = runs or min(_MOST, max(_FEWEST, worthwhile))
    measured = take_turns(ways, count, world, warm_up=0, prepare=case.prepare)
    case.check()
    wrong = torch.tensor([case.wrong[algorithm] for algorithm in algorithms])
    world.control.all_reduce(wrong).wait()
    rows = []
    for (algorithm, seconds), elements in zip(measured.items(), wrong.tolist(), strict=True):
        rows.append(
            CollectiveTime(
                collective=kind,
                algorithm=algorithm,
                size=size,
                workers=world.size,
                runs=count,
                p50=statistics.median(seconds),
                p99=sorted(seconds)[round(0.99 * (count - 1))],
                wrong=elements,
            )
        )
    return rows


class _Case:
    """One collective at one size on one rank: new data and the expected result for each run."""

    def __init__(self, world: World, kind: str, size: int) -> None:
        self._world = world
        self._kind = kind
        count = max(1, size // 4)
        if kind in ("all_gather", "all_to_all"):
            count = max(1, count // world.size)
        pattern = torch.arange(count, dtype=torch.float32, device=world.device)
        self._pattern = pattern.remainder_(61)
        self._run = 0
        self._result: Any = None
        self.wrong: Counter[str] = Counter()
        """Wrong elements on this rank, by algorithm."""

    def prepare(self, algorithm: str) -> None:
        """Check the last run, and make the data of the next one."""
        self.check()
        self._run += 1
        self._algorithm = algorithm
        self._tensors, self._expected = self._data(self._run)

    def run(self, algorithm: str) -> None:
        self._result = getattr(collectives, self._kind)(self._tensors, algorithm=algorithm)

    def check(self) -> None:
        """Count the wrong elements of the last run, once."""
        result = self._result
        self._result = None
        if result is not None:
            if self._kind == "all_to_all":
                result = torch.cat(result)
            self.wrong[self._algorithm] += int((result != self._expected).sum())

    def _data(self, run: int) -> tuple[Tensor | list[Tensor], Tensor]:
        """Return this rank's input and its expected result."""
        rank, size = self._world.rank, self._world.size
        factor = run % 5 + 2
        inputs = [self._pattern + (other + 1) * factor for other in range(size)]
        own = inputs[rank].clone()
        if self._kind == "all_to_all":
            pieces = [own + other for other in range(size)]
            return pieces, torch.cat([tensor + rank for tensor in inputs])
        total = self._pattern * size + sum(range(1, size + 1)) * factor
        expected = {
            "all_reduce": total,
            "broadcast": inputs[0],
            "reduce": total if rank == 0 else inputs[rank],
            "all_gather": torch.cat(inputs),
            "reduce_scatter": total.tensor_split(size)[rank],
        }
        return own, expected[self._kind]


def table(measured: Sequence[CollectiveTime]) -> str:
    """Return a table with nccl-tests' columns and a line for each size and algorithm."""
    native = {}
    for row in measured:
        if row.algorithm == "native":
            native[row.collective, row.size] = row.p50
    head = "collective | algorithm | size | time | p99 | algbw | busbw | #wrong | vs native"
    rows: list[list[object]] = [[None, None, "(B)", "(us)", "(us)", "(GB/s)", "(GB/s)"]]
    for row in measured:
        rows.append(_cells(row, native.get((row.collective, row.size))))
    return text_table(head, rows, left=(0, 1))


def _cells(row: CollectiveTime, native: float | None) -> list[object]:
    return [
        row.collective,
        row.algorithm,
        row.size,
        f"{1e6 * row.p50:.1f}",
        f"{1e6 * row.p99:.1f}",
        f"{row.algbw:.2f}",
        f"{row.busbw:.2f}",
        row.wrong,
        native and f"{native / row.p50:.2f}x",
    ]
