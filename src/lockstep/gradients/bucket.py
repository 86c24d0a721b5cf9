"""A bucket's memory: one flat tensor, of which the parameters' `.grad` are views. When each bucket was
launched and when its sum arrived: how much of the communication the backward hid. Also, how
torch.compile cuts a model by buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.collectives.work import Handle, Work, asks
from lockstep.gradients.layout import FIRST_BUCKET, BucketPlan, Span

_ATTRIBUTE = "_active_ddp_module"
_SECOND = 1e9  # ns


class Bucket:
    """The gradients of some parameters in one flat tensor `sum`. `views[i]` is the place of
    `spans[i]`, with the shape and strides of its parameter.

    So gradients take as much memory as the parameters, and the sum over the ranks arrives in
    `.grad` without a copy.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[nn.Parameter], memory: Tensor
    ) -> None:
        self.index = plan.index
        self.spans: tuple[Span, ...] = plan.spans
        self.place = self.place_of()
        """Where in the program its sum stands, for the comparison of ranks and for errors."""
        self.sum = memory  # zeros, flat
        self.flag = None if plan.flag is None else self.sum[plan.flag : plan.flag + 1]
        self.parameters = [parameters[span.parameter] for span in plan.spans]
        self.views = [
            view_of(self.sum, span, parameter)
            for span, parameter in zip(plan.spans, self.parameters, strict=True)
        ]

    def place_of(self, forward: int | None = None) -> str:
        """Return its place. `forward`: the number of the forward that it belongs to: ranks that
        sum the gradients of different forwards are then found at once.
        """
        more = f" and {len(self.spans) - 1} more" if len(self.spans) > 1 else ""
        of = "" if forward is None else f" of forward {forward}"
        return f"for gradient bucket {self.index}{of} ({self.spans[0].name}{more})"

    def __repr__(self) -> str:
        return (
            f"Bucket({self.index}, {len(self.spans)} gradients,"
            f" {self.sum.numel() * self.sum.element_size() / 2**20:.1f} MiB {self.sum.dtype})"
        )


def view_of(flat: Tensor, span: Span, parameter: Tensor) -> Tensor:
    """A parameter's place in a flat tensor, in the parameter's shape."""
    piece = flat[span.start : span.stop]
    if not piece.numel() and parameter.numel():  # a sparse gradient has no room in the bucket
        return piece
    # Autograd keeps a gradient in its parameter's memory format. A view with the same strides
    # avoids a strided copy (channels_last).
    if _dense(parameter):
        return piece.as_strided(
            parameter.shape, parameter.stride(), storage_offset=flat.storage_offset() + span.start
        )
    return piece.view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Whether the strides enumerate numel() elements without gap or overlap."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True)
class _Buckets:
    bucket_bytes_cap: int


@contextmanager
def cut_by_buckets(bucket_bytes: int, *, wanted: bool = True) -> Iterator[None]:
    """Cut what is compiled in this block into graphs of about `bucket_bytes` of parameters. If not
    `wanted`, change nothing.

    torch.compile makes one backward of a whole graph, so that all gradients would land at its end.
    Inside the forward of torch's DistributedDataParallel the compiler cuts the graph where that
    wrapper's buckets end, so that gradients leave while the backward runs. It recognizes such a
    forward by a class attribute, which holds an object with `bucket_bytes_cap`. There is no public
    way to ask for the cut.
    """
    ddp: Any = nn.parallel.DistributedDataParallel
    if not wanted or not hasattr(ddp, _ATTRIBUTE):
        yield
        return
    before = getattr(ddp, _ATTRIBUTE)
    # torch refuses a cap below that of its own first bucket, after which it always cuts
    setattr(ddp, _ATTRIBUTE, _Buckets(max(bucket_bytes, FIRST_BUCKET)))
    try:
        yield
    finally:
        setattr(ddp, _ATTRIBUTE, before)


class BucketTimes(NamedTuple):
    """The times of one bucket, in seconds of this process's monotonic clock."""

    left: float
    arrived: float | None
    """None if not known yet."""


class BucketTimeline:
    """The times of one window's buckets. Looking never waits: a sum counts as arrived when somebody
    looks, or waits for it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._asks: list[Callable[[], bool] | None] = []
        self._left: list[int] = []
        self._arrived: list[int | None] = []
        self._looked = 0  # the sums before this number have arrived
        self._over: int | None = None

    def launched(self, work: Work) -> None:
        done = asks(work) if isinstance(work, Handle) else getattr(work, "done", None)
        self._asks.append(done)
        self._left.append(time.monotonic_ns())
        self._arrived.append(None)

    def look(self) -> None:
        """Note which sums have arrived. They arrive in the order in which they left."""
        while (
            self._looked < len(self._asks)
            and (done := self._asks[self._looked]) is not None
            and done()
        ):
            self._arrived[self._looked] = time.monotonic_ns()
            self._looked += 1

    def backward_is_over(self) -> None:
        """Note that the backward has ended: from now on no communication is hidden."""
        self.look()
        self._over = time.monotonic_ns()

    def waited_for(self, number: int) -> None:
        if self._arrived[number] is None:
            self._arrived[number] = time.monotonic_ns()

    def times(self) -> Sequence[BucketTimes]:
        """The times of all buckets, in the order in which they left."""
        return [
            BucketTimes(left / _SECOND, None if at is None else at / _SECOND)
            for left, at in zip(self._left, self._arrived, strict=True)
        ]

    def hidden(self) -> float:
        """Seconds in which at least one bucket was on its way while the backward ran. A sum that
        starts only when a rank waits for it is not hidden.
        """
        total = reached = 0
        for done, left, arrived in zip(self._asks, self._left, self._arrived, strict=True):
            if done is not None and self._over is not None and left < self._over:
                end = self._over if arrived is None else min(arrived, self._over)
                total += max(0, end - max(left, reached))
                reached = max(reached, end)
        return total / _SECOND
