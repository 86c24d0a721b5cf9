"""The reduction of buckets that travel compressed (gradients/reductions.py): what all compressors
have in common.

Error feedback (Karimireddy et al., ICML 2019): what compression has left out so far is added to the
next step's gradient.

    to send    = gradient + owed
    owed       = to send - what was sent of it         on every rank for itself

So nothing is lost, it only comes later. After any number of steps, the sum of all applied gradients
and of what all ranks owe is the sum of all gradients.

What is owed has the unit of gradients as they are sent: sums over a step's micro-batches, which the
Stepper divides by the step's own weight. So what a full step owes counts more in a short last step,
whose divisor is smaller, and what a short step owes counts less in a full one. Steps of equal
weight have no such effect. The unit of a loss scaler changes, so the Stepper refuses it.

Slices go to their owners:

    rank 0   [ a0 | a1 | a2 ]        slice r of every rank's bucket goes to rank r (all-to-all),
    rank 1   [ b0 | b1 | b2 ]   ->   which unpacks them, adds them in the order of ranks and packs
    rank 2   [ c0 | c1 | c2 ]        the sum once; then every rank gets every sum (all-gather)

A backend would add packed numbers as they are: bfloat16 in bfloat16, and int8 not at all. Here an
owner adds in float32, and a number is rounded twice for any number of ranks. Each sum has one
owner, so all ranks have the same bits of it. A ring would send as many bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.work import Done, Staged, Work
from lockstep.config.parallelism import Compression
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import ALIGNMENT, BucketPlan, Layout
from lockstep.gradients.reductions import Reduction

_NAME = "error/"
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Stages = Generator[Work, None, tuple[Tensor, Tensor | None]]
"""Collectives, each of which begins when the ones before it are done. The return value: the sum
over all ranks, equal on all of them, and what this rank could not send of its own part (or None).
"""


class Compressor(ABC):
    """A way to compress."""

    @abstractmethod
    def sum(self, flat: Tensor, bucket: Bucket) -> Stages:
        """Sum `flat` over all ranks. It holds the gradients of `bucket` plus what was owed of them,
        in float32 or float64.
        """

    def kept(self) -> Mapping[str, Tensor]:
        """The state that it keeps from step to step, equal on all ranks."""
        return {}

    def take_back(self, common: Mapping[str, Tensor]) -> None:
        return


class Compressed(Reduction):
    """The reduction by a compressor. The first stage of a bucket leaves during the backward. The
    others leave in `wait`, that is, in the order of buckets on every rank.

    If a bucket's sum is not finite, what is owed stays as it was, so that no nan gets into it. Such
    a step is skipped. Debts that other buckets paid in it are then lost, like its gradient.
    """

    carries_all = False

    def __init__(self, compression: Compression, compressor: Compressor, group: Group) -> None:
        self.name = str(compression)
        self._compressor = compressor
        self._owed = Owed(group) if compression.owes else None

    def memory(self, layout: Layout) -> list[Tensor]:
        for plan in layout.buckets:
            if plan.dtype not in _FLOATS:
                dtype = str(plan.dtype).removeprefix("torch.")
                raise UsageError(
                    "compress-not-floats",
                    compress=self.name,
                    parameter=plan.spans[0].name,
                    dtype=dtype,
                )
        if self._owed is not None:
            self._owed.lay(layout)
        return super().memory(layout)

    def start(self, bucket: Bucket) -> Work:
        numel = bucket.sum.numel()
        if bucket.flag is not None:
            numel -= ALIGNMENT
        if not numel:
            return Done()
        return Staged(self._stages(bucket, bucket.sum.data[:numel]))

    def _stages(self, bucket: Bucket, gradients: Tensor) -> Generator[Work]:
        flat = gradients.to(working(gradients.dtype))
        owed = None if self._owed is None else self._owed.of(bucket.index, flat.numel())
        if owed is not None:
            flat += owed
        total, left = yield from self._compressor.sum(flat, bucket)
        if owed is not None and left is not None:
            # decided on the device, so that the host does not wait
            torch.where(total.isfinite().all(), left, owed, out=owed)
        for span in bucket.spans:  # not the gaps between them, which would never be cleared
            gradients[span.start : span.stop].copy_(total[span.start : span.stop])

    def kept(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._compressor.kept(), {} if self._owed is None else self._owed.kept()

    def take_back(
        self, common: Mapping[str, Tensor], by_rank: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._compressor.take_back(common)
        if self._owed is not None:
            self._owed.take_back(by_rank)


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of `dtype` are added and remembered: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Owed:
    """What this rank owes: one flat tensor per bucket. It follows the parameters when buckets are
    laid out again.

    A parameter that is no longer trained is owed nothing.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._plans: tuple[BucketPlan, ...] = ()
        self._flats: list[Tensor] = []

    def lay(self, layout: Layout) -> None:
        """Follow a new layout of the buckets."""
        before = self._by_parameter()
        self._plans = layout.buckets
        self._flats = [
            torch.zeros(plan.numel, dtype=working(plan.dtype), device=plan.device)
            for plan in layout.buckets
        ]
        for name, owed in self._by_parameter().items():
            if name in before and before[name].shape == owed.shape:
                owed.copy_(before[name])

    def of(self, bucket: int, numel: int) -> Tensor:
        """What this rank owes of the first `numel` elements of a bucket."""
        return self._flats[bucket][:numel]

    def kept(self) -> dict[str, Tensor]:
        """What this rank owes, flat, by the parameters' names."""
        return {_NAME + name: owed for name, owed in self._by_parameter().items() if owed.numel()}

    def take_back(self, by_rank: Sequence[Mapping[str, Tensor]]) -> None:
        """Restore what every rank owed. With fewer ranks now, a rank takes over the debts of
        several; with more ranks, the new ones owe nothing.
        """
        states = by_rank[self._group.rank :: self._group.size]
        for name, owed in self._by_parameter().items():
            owed.zero_()
            for state in states:
                if _NAME + name in state:
                    owed += state[_NAME + name].to(owed.device)

    def _by_parameter(self) -> dict[str, Tensor]:
        pieces = {}
        for plan, flat in zip(self._plans, self._flats, strict=True):
            for span in plan.spans:
                pieces[span.name] = flat[span.start : span.stop]
        return pieces


def sliced(flat: Tensor, size: int, multiple: int = 1) -> Tensor:
    """Return one row per rank, [size, length], with zeros behind the end. `length` is a multiple of
    `multiple`.
    """
    length = -(-flat.numel() // (size * multiple)) * multiple
    if flat.numel() == size * length:
        return flat.view(size, length)
    rows = flat.new_zeros(size * length)
    rows[: flat.numel()].copy_(flat)
    return rows.view(size, length)


def to_owners(group: Group, rows: Tensor, purpose: str) -> tuple[Tensor, Work]:
    """Start to send row r to rank r. Once the work is done, the returned tensor holds what each
    rank sent to this one, by rank. It has the shape of `rows`.
    """
    if group.size == 1:
        return rows, Done()
    rows = rows.contiguous()
    arriving = torch.empty_like(rows)
    lengths = [rows.shape[1]] * group.size
    work = group.exchange(arriving.view(-1), lengths, rows.view(-1), lengths, purpose)
    return arriving, work


def added(rows: Tensor) -> Tensor:
    """The sum of rows, in their order."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
