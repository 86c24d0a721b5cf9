"""Which Reducer a Stepper works with: one for a bare module, or that of a wrapped one."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.checks.start import model_fields
from lockstep.checks.trained import check_trained
from lockstep.collectives.group import Group
from lockstep.data_parallel import DistributedDataParallel
from lockstep.errors import UsageError
from lockstep.gradients.alone import Alone
from lockstep.gradients.compression.choice import check_matrices, compressed
from lockstep.gradients.exact.choice import exact_reducer
from lockstep.gradients.layout import BUCKET
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction
from lockstep.gradients.replicate import replicate
from lockstep.method import Method


def set_up_of(model: nn.Module, group: Group, fields: dict[str, Any]) -> tuple[Group, dict[str, Any]]:
    """The ranks that must be set up alike (a wrapped model's own, else `group`), and what of this model they compare."""
    if isinstance(model, DistributedDataParallel):
        return model.group, {**model_fields(model.module, model.ignored), **fields}
    return group, {**model_fields(model), **fields}


def reducer_of(model: nn.Module, method: Method, bucket_mb: float | None, group: Group, *, alone: bool) -> tuple[Reducer, nn.Module]:
    """Gradients are summed over `group`. `alone`: this rank steps with its own gradients; what would sum them is for meetings."""
    if bucket_mb is not None and not bucket_mb > 0:
        raise UsageError(f"bucket_mb={bucket_mb}: a bucket holds more than 0 MiB")
    if isinstance(model, DistributedDataParallel):
        if method.alone or method.compress is not None:
            what = (
                f"compress={method.compress!r}"
                if method.compress
                else f"sync_every={method.sync_every}"
                if method.local
                else f"update={method.update!r}"
            )
            raise UsageError(f"{what} needs the bare module: the wrapped model's reducer sums every gradient as it is, in every backward")
        if method.exact:
            raise UsageError("exact=True needs the bare module: the wrapped model's reducer adds micro-batches in another order")
        if bucket_mb is not None:
            raise UsageError(
                f"bucket_mb={bucket_mb}: the wrapped model has its own buckets; give bucket_cap_mb= to DistributedDataParallel"
            )
        if method.reduce != "auto":
            raise UsageError(
                f"reduce={method.reduce!r}: the wrapped model has its own reducer; give reduce= to DistributedDataParallel, or the bare module here"
            )
        return model.give_up_reducer(), model.module
    check_trained(model)
    replicate(model, group)
    bucket_bytes = BUCKET if bucket_mb is None else int(bucket_mb * 2**20)
    if method.exact:
        return exact_reducer(model, method.reduce, group, bucket_bytes), model
    if method.compression is None:
        chosen = reduction("native" if method.server else method.reduce, group)
    else:
        check_matrices(method.compression, model, group.ranks[group.rank])
        chosen = compressed(method.compression, group)
    if not alone:
        return Reducer(model, group, chosen, bucket_bytes=bucket_bytes), model
    if method.local is not None and method.local.fragments > 1:  # fragments consist of whole buckets
        octets = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        bucket_bytes = max(1, min(bucket_bytes, octets // method.local.fragments))
    meeting = Alone(chosen)
    if method.server is not None:
        meeting.name = "messages"
    return Reducer(model, group.alone(), meeting, bucket_bytes=bucket_bytes), model
