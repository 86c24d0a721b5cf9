"""Communication hooks written for torch's DistributedDataParallel run on our buckets as they are.

torch's GradBucket cannot be constructed from Python; hooks only call its six methods, and those are here. A hook returns a future of
the *mean* over the ranks: it divides, so nobody else does.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import status
from lockstep.collectives.group import Work
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.layout import Layout
from lockstep.gradients.reductions import private

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


class GradBucket:
    """What a hook sees of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The whole bucket, flat. Between the gradients are zeros, behind those of the last bucket a count."""
        return self._bucket.sum

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the content of the bucket."""
        self._bucket.sum.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The gradients, as views of the buffer."""
        return list(self._bucket.views)

    def parameters(self) -> list[nn.Parameter]:
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this bucket is the last of its backward."""
        return self._bucket.flag is not None


class TorchHook:
    """A reduction by a communication hook."""

    name = "hook"
    carries_all = False  # PowerSGD and its like send the gradients, not the bucket
    divisor: float | None = None

    def __init__(self, state: object, hook: Hook) -> None:
        self._state = state
        self._hook = hook

    def scatter(self) -> None:
        pass

    def memory(self, layout: Layout) -> list[Tensor]:
        return private(layout)

    def start(self, bucket: Bucket) -> Work:
        return _Promised(self._hook(self._state, GradBucket(bucket)), bucket)


class _Promised:
    def __init__(self, future: torch.futures.Future[Any], bucket: Bucket) -> None:
        self._future, self._bucket = future, bucket

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        status.waits(True)
        result = self._future.wait()
        status.waits(False)
        mean = result[0] if isinstance(result, (list, tuple)) else result
        if mean.data_ptr() != self._bucket.sum.data_ptr():
            self._bucket.sum.copy_(mean.view_as(self._bucket.sum))
