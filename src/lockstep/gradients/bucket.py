"""A bucket's memory: one flat tensor that the parameters' `.grad` are views of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.gradients.layout import BucketPlan, Span


class Bucket:
    """The gradients of some parameters in one flat tensor `sum`; `views[i]` is the place of `spans[i]`, shaped and strided as its parameter.

    So gradient memory is one times the parameters, and what arrives from the other ranks is in `.grad` without a copy.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[nn.Parameter], memory: Tensor) -> None:
        self.index = plan.index
        self.spans: tuple[Span, ...] = plan.spans
        more = f" and {len(plan.spans) - 1} more" if len(plan.spans) > 1 else ""
        self.place = f"for gradient bucket {plan.index} ({plan.spans[0].name}{more})"  # in errors
        self.sum = memory  # zeros, flat
        self.flag = None if plan.flag is None else self.sum[plan.flag : plan.flag + 1]
        self.parameters = [parameters[span.parameter] for span in plan.spans]
        self.views = [view_of(self.sum, span, parameter) for span, parameter in zip(plan.spans, self.parameters, strict=True)]

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.spans)} gradients, {self.sum.numel() * self.sum.element_size() / 2**20:.1f} MiB {self.sum.dtype})"


def view_of(flat: Tensor, span: Span, parameter: Tensor) -> Tensor:
    """A parameter's place in a flat tensor, in the parameter's shape."""
    piece = flat[span.start : span.stop]
    if not piece.numel() and parameter.numel():  # a gradient that travels by other ways
        return piece
    # Autograd keeps a gradient in its parameter's memory format; a view of the same strides spares a strided copy (channels_last).
    if _dense(parameter):
        return piece.as_strided(parameter.shape, parameter.stride(), storage_offset=flat.storage_offset() + span.start)
    return piece.view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Whether the strides enumerate numel() elements without gap or overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
