"""A bucket's memory: one flat tensor, of which the parameters' `.grad` are views. Also, how
torch.compile cuts a model by buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.gradients.layout import FIRST_BUCKET, BucketPlan, Span

_ATTRIBUTE = "_active_ddp_module"


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
