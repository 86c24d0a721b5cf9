"""How the gradients of a rank's own micro-batches become one gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.data.windows import Cut
from lockstep.gradients.bucket import Bucket


class Fold(ABC):
    """What a Reducer calls to combine a rank's own gradients. Parameters go by their numbers."""

    adds_in_place = False
    """Whether a gradient can have its place before it lands, so that autograd adds to it there."""

    def sizes(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """How many elements of a bucket each parameter's gradient takes."""
        return [parameter.numel() for parameter in parameters]

    @abstractmethod
    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        """Give the gradients new places, in these buckets."""

    def keep(self, small: Collection[int]) -> None:
        """Give these gradients their places from the beginning of each window."""
        return

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        """Forget all gradients."""
        for parameter in parameters:
            parameter.grad = None

    def all_in_place(self, numbers: Iterable[int]) -> bool:
        """Whether these gradients are where `add` would leave them."""
        return False

    def add_all(self, numbers: Iterable[int], scale: float) -> bool:
        """Take these gradients, times `scale`, at once. Return whether it was possible; if not,
        nothing was changed.
        """
        return False

    def begin(self, cut: Cut | None) -> bool:
        """Begin a window, in which nothing has landed yet. Return whether its gradients need other
        memory, so that the buckets must be laid again.
        """
        return False

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch of this rank."""
        return

    @abstractmethod
    def add(self, number: int, scale: float) -> None:
        """Take a parameter's gradient, `.grad`, times `scale`."""

    def keeps_sparse(self, number: int) -> bool:
        """Whether a parameter's sparse gradient stays sparse."""
        return False

    @abstractmethod
    def sets_order(self, *, closing: bool) -> bool:
        """Whether buckets must follow the order in which gradients arrive in this micro-batch."""

    def end_micro_batch(self) -> None:
        """End a micro-batch that is not the last."""
        return

    @abstractmethod
    def fill(self, number: int, scale: float) -> None:
        """Complete a parameter's gradient, which gets no further contribution in this window."""

    def complete(self, bucket: Bucket) -> None:
        """Prepare a bucket to leave: all its gradients are complete."""
        return

    def deliver(self) -> None:
        """Make the sums over all ranks, which have arrived, the parameters' `.grad`."""
        return

    @abstractmethod
    def cleared(self, number: int, *, adding: bool) -> bool:
        """Whether somebody has replaced a gradient that landed. `adding`: the next micro-batch's
        gradient is about to be added.
        """


class InPlace(Fold):
    """Every micro-batch is added to the same memory, by autograd itself. Once a gradient has
    landed, `.grad` is a view of the bucket.
    """

    adds_in_place = True
    _views: Sequence[Tensor] = ()
    _buckets: Sequence[Bucket] = ()

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buckets = buckets
        views: dict[int, Tensor] = {}
        for bucket in buckets:
            for span, view in zip(bucket.spans, bucket.views, strict=True):
                views[span.parameter] = view
        self._views = [views[number] for number in range(len(parameters))]
        for view, parameter in zip(self._views, parameters, strict=True):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.shape == view.shape:
                parameter.grad = view.copy_(gradient)

    def keep(self, small: Collection[int]) -> None:
        self._first: list[Tensor | None] = [None] * len(self._views)
        for number in small:
            self._first[number] = self._views[number]
        # adjacent gradients are cleared in one call
        self._to_clear: list[Tensor] = []
        for bucket in self._buckets:
            for is_small, group in groupby(bucket.spans, lambda span: span.parameter in small):
                if is_small:
                    spans = list(group)
                    self._to_clear.append(bucket.sum[spans[0].start : spans[-1].stop])

    def clear(self, parameters: Sequence[nn.Parameter]) -> None:
        for flat in self._to_clear:
            flat.zero_()
        for parameter, first in zip(parameters, self._first, strict=True):
            if parameter.grad is not first:
                parameter.grad = first

    def all_in_place(self, numbers: Iterable[int]) -> bool:
        for number in numbers:  # noqa: SIM110 - a generator costs a call for each gradient
            if self._parameters[number].grad is not self._views[number]:
                return False
        return True

    def add_all(self, numbers: Iterable[int], scale: float) -> bool:
        moved: list[Tensor] = []
        gradients: list[Tensor] = []
        views: list[Tensor] = []
        parameters: list[nn.Parameter] = []
        for number in numbers:
            view = self._views[number]
            parameter = self._parameters[number]
            gradient = parameter.grad
            views.append(view)
            if gradient is view:
                continue
            if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
                return False
            moved.append(view)
            gradients.append(gradient)
            parameters.append(parameter)
        if moved:
            torch._foreach_copy_(moved, gradients)
            for view, parameter in zip(moved, parameters, strict=True):
                parameter.grad = view
        if scale != 1 and views:
            torch._foreach_mul_(views, scale)
        return True

    def add(self, number: int, scale: float) -> None:
        """Make `.grad` the view, scaled. A gradient that autograd put elsewhere is copied once, in
        the same pass. Autograd adds later micro-batches in place.
        """
        view = self._views[number]
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient is view:
            if scale != 1:
                view.mul_(scale)
        else:
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if scale == 1:
                view.copy_(gradient)
            elif gradient.dtype == view.dtype:
                torch.mul(gradient, scale, out=view)
            else:
                view.copy_(gradient).mul_(scale)
        parameter.grad = view

    def sets_order(self, *, closing: bool) -> bool:
        return closing

    def fill(self, number: int, scale: float) -> None:
        self.add(number, scale)

    def cleared(self, number: int, *, adding: bool) -> bool:
        return self._parameters[number].grad is not self._views[number]


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """The weights that get sparse gradients: those of embeddings with sparse=True."""
    return [
        child.weight
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    ]


class KeepsSparse(InPlace):
    """Like InPlace, but the gradients of sparse embeddings stay sparse, and take no room in
    buckets.

    The rows that any rank's batch has touched travel after the buckets, and are summed over all
    ranks.
    """

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module = module
        self._group = group
        self._sparse: dict[int, str] = {}

    def sizes(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        sparse = set(map(id, sparse_parameters(self._module)))
        sizes = super().sizes(parameters)
        for number, parameter in enumerate(parameters):
            if id(parameter) in sparse:
                sizes[number] = 0
        return sizes

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        super().lay(buckets, parameters)
        self._sparse = {}
        for bucket in buckets:
            for span in bucket.spans:
                if span.start == span.stop and parameters[span.parameter].numel():
                    self._sparse[span.parameter] = span.name

    def add(self, number: int, scale: float) -> None:
        if number not in self._sparse:
            super().add(number, scale)
            return
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            return
        if not gradient.is_sparse:  # by a dense layer that is tied to the embedding
            gradient = gradient.to_sparse(1)
        if scale != 1:
            gradient = gradient * scale
        parameter.grad = gradient

    def keeps_sparse(self, number: int) -> bool:
        return number in self._sparse

    def deliver(self) -> None:
        for number, name in sorted(self._sparse.items()):
            self._parameters[number].grad = self._sum(self._parameters[number], name)

    def cleared(self, number: int, *, adding: bool) -> bool:
        return number not in self._sparse and super().cleared(number, adding=adding)

    def _sum(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        """Return one gradient's rows summed over all ranks. If no rank has rows, return `.grad`."""
        purpose = f"for the rows of {name}"
        if parameter.grad is None:
            rows = parameter.new_zeros(0, dtype=torch.int64)
            values = parameter.detach()[:0]
        else:
            gradient = parameter.grad.coalesce()
            rows = gradient.indices()[0]
            values = gradient.values()
        count = torch.tensor(len(rows), device=rows.device)
        counts: list[int] = self._group.all_gather(count, place=purpose).tolist()
        if self._group.size == 1 or not max(counts):
            return parameter.grad
        all_rows = self._joined(rows, counts, purpose)
        all_values = self._joined(values, counts, purpose)
        return torch.sparse_coo_tensor(all_rows[None], all_values, parameter.shape).coalesce()

    def _joined(self, tensor: Tensor, counts: Sequence[int], purpose: str) -> Tensor:
        """Return the rows of every rank's tensor, by rank. `counts`: how many each rank has."""
        longest = max(counts)
        padding = tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])
        gathered = self._group.all_gather(torch.cat([tensor, padding]), place=purpose)
        pieces = gathered.split(longest)
        return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])
