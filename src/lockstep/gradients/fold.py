"""How the gradients of a rank's own micro-batches become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from lockstep.data.windows import Cut
from lockstep.gradients.bucket import Bucket


class Fold(Protocol):
    """What a Reducer asks of it. Parameters go by their numbers."""

    def room(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """How many elements of a bucket each parameter's gradient takes."""
        ...

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        """Gradients have new places."""
        ...

    def begin(self, cut: Cut | None) -> bool:
        """A window begins, in which nothing has landed. True where its gradients need other memory: the buckets must be laid again."""
        ...

    def open(self) -> None:
        """A micro-batch of this rank begins."""
        ...

    def land(self, number: int, scale: float) -> None:
        """Take a parameter's gradient, `.grad`, times `scale`."""
        ...

    def sets_order(self, *, closing: bool) -> bool:
        """Whether buckets shall follow the order in which gradients arrive in this micro-batch."""
        ...

    def shut(self) -> None:
        """A micro-batch is over that was not the last."""
        ...

    def fill(self, number: int, scale: float) -> None:
        """A parameter gets no further gradient in this window: what there is of it is complete."""
        ...

    def complete(self, bucket: Bucket) -> None:
        """All gradients of a bucket are complete: it is about to leave."""
        ...

    def deliver(self) -> None:
        """The sums over all ranks are there: make them the parameters' `.grad`."""
        ...

    def cleared(self, number: int, *, landing: bool) -> bool:
        """Whether somebody has replaced a gradient that landed; `landing`: while the next micro-batch's is about to land."""
        ...


class InPlace:
    """A micro-batch after the other is added to the same memory, by autograd itself: `.grad` is a view of the bucket all the time."""

    def room(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        return [parameter.numel() for parameter in parameters]

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        homes = {span.parameter: view for bucket in buckets for span, view in zip(bucket.spans, bucket.views, strict=True)}
        self._views = [homes[number] for number in range(len(parameters))]
        for view, parameter in zip(self._views, parameters, strict=True):
            if parameter.grad is not None and parameter.grad.shape == view.shape and not parameter.grad.is_sparse:
                parameter.grad = view.copy_(parameter.grad)

    def begin(self, cut: Cut | None) -> bool:
        return False

    def open(self) -> None:
        pass

    def land(self, number: int, scale: float) -> None:
        """Make `.grad` the view, scaled. What autograd put elsewhere is copied once, in the same pass; later micro-batches it adds in place."""
        view, parameter = self._views[number], self._parameters[number]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif grad is view:
            if scale != 1:
                view.mul_(scale)
        else:
            grad = grad.to_dense() if grad.is_sparse else grad
            if scale != 1 and grad.dtype == view.dtype:
                torch.mul(grad, scale, out=view)
            else:
                view.copy_(grad)
                if scale != 1:
                    view.mul_(scale)
        parameter.grad = view

    def sets_order(self, *, closing: bool) -> bool:
        return closing

    def shut(self) -> None:
        pass

    def fill(self, number: int, scale: float) -> None:
        self.land(number, scale)

    def complete(self, bucket: Bucket) -> None:
        pass

    def deliver(self) -> None:
        pass

    def cleared(self, number: int, *, landing: bool) -> bool:
        return self._parameters[number].grad is not self._views[number]
