"""The gradients of a real model as a plan sees them: shapes, and buckets in the order in which they leave."""

from __future__ import annotations

from torch import nn

from lockstep.errors import UsageError
from lockstep.gradients.layout import BUCKET, FIRST_BUCKET, Entry, plan
from lockstep.plan.methods.cost import Gradients
from lockstep.plan.simulation.work import WIDTH


def gradients_of(model: nn.Module) -> Gradients:
    """Nothing is computed: the backward is taken to reach the parameters from the last to the first. Raises UsageError where none is trained."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if not named:
        raise UsageError(f"{type(model).__name__} has no parameter that is trained: there is no gradient to send")
    entries = [Entry(name, each.numel(), each.dtype, each.device) for name, each in named]
    layout = plan(entries, list(reversed(range(len(entries)))), bucket=BUCKET, first_bucket=FIRST_BUCKET)
    buckets = tuple(sum(span.stop - span.start for span in bucket.spans) for bucket in layout.buckets)
    elements = sum(each.numel() for _, each in named)
    width = sum(each.numel() * each.element_size() for _, each in named) / elements if elements else WIDTH
    return Gradients(tuple(tuple(each.shape) for _, each in named), buckets, width)
