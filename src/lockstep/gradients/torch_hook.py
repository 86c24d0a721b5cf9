"""Runs communication hooks for torch's DistributedDataParallel, unchanged, on Lockstep's buckets.

Python cannot construct torch's GradBucket. Hooks only call its six methods, which are implemented
here. A hook returns a future of the *mean* over the ranks: it divides, so nothing else does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lockstep.collectives.work import Work
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.reductions import Reduction
from lockstep.runtime import status

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


def check_hook(hook: object) -> None:
    """Raise torch's types of error if this cannot be a communication hook: TypeError, or UsageError
    (a ValueError) for its annotations.
    """
    if not callable(hook):
        raise TypeError(
            f"a communication hook must be callable, and this is a {type(hook).__name__}: give a"
            " function of (state, bucket)"
        )
    signature = inspect.signature(hook)
    parameters = list(signature.parameters.values())
    bucket = parameters[1].annotation if len(parameters) > 1 else None
    futures = (torch.futures.Future[torch.Tensor], torch.futures.Future)
    _check_annotation("bucket annotation", bucket, (dist.GradBucket, GradBucket))
    _check_annotation("return annotation", signature.return_annotation, futures)


def _check_annotation(name: str, annotation: object, allowed: Sequence[object]) -> None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return
    if annotation not in allowed:
        raise UsageError(
            "hook-annotation", what=name, expected=str(allowed[0]), found=str(annotation)
        )


class GradBucket:
    """A bucket as a hook sees it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The whole bucket, flat. There are zeros between the gradients, and a count behind those
        of the last bucket.
        """
        return self._bucket.sum

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the content of the bucket."""
        self._bucket.sum.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The gradients, as views of the buffer."""
        return [
            view
            for view, span in zip(self._bucket.views, self._bucket.spans, strict=True)
            if span.start < span.stop
        ]

    def parameters(self) -> list[nn.Parameter]:
        return [
            parameter
            for parameter, span in zip(self._bucket.parameters, self._bucket.spans, strict=True)
            if span.start < span.stop
        ]

    def is_last(self) -> bool:
        """Whether this bucket is the last of its backward."""
        return self._bucket.flag is not None


class TorchHook(Reduction):
    """A reduction that runs a communication hook."""

    name = "hook"
    carries_all = False  # PowerSGD and its like send the gradients, not the bucket

    def __init__(self, state: object, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    @property
    def keeps_replicas_equal(self) -> bool:
        """False for local SGD: between two averages of the weights every host has its own."""
        return not isinstance(self._state, PostLocalSGDState)

    def start(self, bucket: Bucket) -> Work:
        future = self._hook(self._state, GradBucket(bucket))
        if not isinstance(future, torch.futures.Future | torch._C.Future):
            raise UsageError("hook-without-future", found=type(future).__name__)
        return _Promised(future, bucket)


class _Promised:
    def __init__(self, future: torch.futures.Future[Any], bucket: Bucket) -> None:
        self._future = future
        self._bucket = bucket

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        status.waits(True)
        result = self._future.wait()
        status.waits(False)
        mean = result[0] if isinstance(result, (list, tuple)) else result
        total = self._bucket.sum
        if not isinstance(mean, Tensor):
            raise UsageError(
                "hook-wrong-size", found=f"a {type(mean).__name__}", numel=total.numel()
            )
        if mean.numel() != total.numel():
            raise UsageError(
                "hook-wrong-size", found=f"a tensor of {mean.numel()}", numel=total.numel()
            )
        if mean.data_ptr() != total.data_ptr():
            total.copy_(mean.view_as(total))
