"""Ways for two ranks of one host to add up large gradients, in turns: what a step pays between the
backward and the optimizer.

    python benchmarks/copies.py
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.cpu.x86_non_temporal_threshold=0x100000 \\
        python benchmarks/copies.py

The gradients are those of the MLP of 25 M: six tensors of 16 MiB, new in every turn, as autograd makes
them. "sum": both ranks get the whole sum; "slice": each rank gets its half, for a sharded update.

    copy        what Lockstep does: each rank copies its gradients to shared memory; then each adds
                its half, and writes it to both
    accumulate  autograd adds to `.grad` that lies in shared memory: zeros, then an addition
    memmove     copy, by the C library, which may write past the caches (the second command)
    half        a rank copies only the half that the other adds
    read        nothing is copied: a rank reads its half from the other's gradients by the kernel's
                cross-memory read, piece by piece, and adds it to its own; the halves are read back
    bucket      as read, but the sum is written to shared memory

"read" and "bucket" need the right to trace the other process (Yama, containers).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import lockstep
from lockstep.collectives.native import memory_of
from lockstep.tools.timing.in_turns import take_turns
from lockstep.tools.timing.output_files import milliseconds, table

_GRADIENTS, _ELEMENTS = 6, 2**22
_PIECE = 2**18  # elements
_HALF = _GRADIENTS // 2  # gradients of a rank's half


class Range(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def read(into: Tensor, pid: int, address: int) -> None:
    """Fill a tensor from another process's memory. Raises OSError where it is not allowed."""
    local = Range(into.data_ptr(), into.nbytes)
    remote = Range(address, into.nbytes)
    done = _libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if done != into.nbytes:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Ranks:
    """Two ranks, the memory that they share, and this rank's gradients of a turn."""

    def __init__(self, world: lockstep.World) -> None:
        self.memory = memory_of(world.group)
        self.rank = world.rank
        self.parts = self.memory.allocate([_GRADIENTS * _ELEMENTS], [torch.float32])[0]
        self.own = self.parts[self.rank].split(_ELEMENTS)
        # what each rank tells the other: its process, and the addresses of its gradients
        told = self.memory.allocate([1 + _GRADIENTS], [torch.int64])[0]
        self.told, self.other = told[self.rank], told[1 - self.rank]
        self.told[0] = os.getpid()
        self.scratch = torch.empty(_PIECE)
        self.gradients: list[Tensor] = []

    def new(self) -> None:
        """Make the gradients of a turn, as a backward does."""
        self.gradients = [torch.full((_ELEMENTS,), float(self.rank)) for _ in range(_GRADIENTS)]

    def halves(self) -> tuple[range, range]:
        """The numbers of the gradients in this rank's half, and in the other's."""
        halves = range(_HALF), range(_HALF, _GRADIENTS)
        return halves[self.rank], halves[1 - self.rank]

    def add(self, scattered: bool) -> None:
        self.memory.sum_in_place(self.parts, scattered=scattered).wait()
        self.gradients.clear()


def copy(ranks: Ranks, scattered: bool) -> None:
    for place, gradient in zip(ranks.own, ranks.gradients, strict=True):
        place.copy_(gradient)
    ranks.add(scattered)


def accumulate(ranks: Ranks, scattered: bool) -> None:
    for place, gradient in zip(ranks.own, ranks.gradients, strict=True):
        place.zero_()
        place.add_(gradient)
    ranks.add(scattered)


def memmove(ranks: Ranks, scattered: bool) -> None:
    for place, gradient in zip(ranks.own, ranks.gradients, strict=True):
        ctypes.memmove(place.data_ptr(), gradient.data_ptr(), gradient.nbytes)
    ranks.add(scattered)


def half(ranks: Ranks, scattered: bool) -> None:
    own, others = ranks.halves()
    for number in others:
        ranks.own[number].copy_(ranks.gradients[number])
    ranks.memory.synchronize("the halves are there")
    remote = ranks.parts[1 - ranks.rank].split(_ELEMENTS)
    for number in own:
        for start in range(0, _ELEMENTS, _PIECE):
            piece = slice(start, start + _PIECE)
            place = ranks.own[number][piece]
            torch.add(ranks.gradients[number][piece], remote[number][piece], out=place)
            if not scattered:
                remote[number][piece].copy_(place)
    ranks.memory.synchronize("the sums are there")
    ranks.gradients.clear()


def cross_memory(ranks: Ranks, scattered: bool, *, to_bucket: bool = False) -> None:
    own, others = ranks.halves()
    sums = ranks.own if to_bucket else ranks.gradients
    ranks.told[1:] = torch.tensor([gradient.data_ptr() for gradient in ranks.gradients])
    ranks.memory.synchronize("the addresses are there")
    pid, *addresses = ranks.other.tolist()
    for number in own:
        for start in range(0, _ELEMENTS, _PIECE):
            read(ranks.scratch, pid, addresses[number] + 4 * start)
            piece = slice(start, start + _PIECE)
            torch.add(ranks.gradients[number][piece], ranks.scratch, out=sums[number][piece])
    ranks.memory.synchronize("the sums are there")
    if not scattered:
        remote = ranks.parts[1 - ranks.rank].split(_ELEMENTS)
        for number in others:
            if to_bucket:
                ranks.own[number].copy_(remote[number])
            else:
                read(ranks.gradients[number], pid, addresses[number])
        ranks.memory.synchronize("the sums were read")
    ranks.gradients.clear()


WAYS: dict[str, Callable[[Ranks, bool], None]] = {
    "copy": copy,
    "accumulate": accumulate,
    "memmove": memmove,
    "half": half,
    "read": cross_memory,
    "bucket": partial(cross_memory, to_bucket=True),
}


def measure(turns: int) -> dict[str, list[float]]:
    with lockstep.init(backend="gloo") as world:
        torch.set_num_threads(1)
        ranks = Ranks(world)
        seconds = {}
        for scattered in (False, True):
            ways = {name: partial(way, ranks, scattered) for name, way in WAYS.items()}
            found = take_turns(ways, turns, world, prepare=lambda name: ranks.new())
            for name, times in found.items():
                seconds[f"{name}, {'slice' if scattered else 'sum'}"] = times
        return seconds


def text(seconds: dict[str, list[float]]) -> str:
    lines: list[Sequence[str]] = []
    for name, times in seconds.items():
        of_copy = statistics.median(seconds[f"copy, {name.partition(', ')[2]}"])
        median, quarter = statistics.median(times), statistics.quantiles(times, n=4)[0]
        saved = 1e3 * (of_copy - median)
        lines.append([name, milliseconds(median), milliseconds(quarter), f"{saved:+.1f} ms"])
    return table(["way", "median", "p25", "saved"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    found = lockstep.launch(measure, workers=2, args=(options.turns,))[0]
    print(f"2 ranks, 96 MiB of gradients, {options.turns} turns each")
    print(text(found))


if __name__ == "__main__":
    main()
