"""Gradients of embeddings that stay sparse: the rows that any rank's batch has touched, added up over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.fold import InPlace


def sparse_parameters(module: nn.Module) -> list[Tensor]:
    """The weights that get sparse gradients: those of embeddings with sparse=True."""
    return [child.weight for child in module.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse]


class KeepsSparse(InPlace):
    """As InPlace, but the gradients of sparse embeddings take no room in buckets: they travel as rows, after the buckets."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module, self._group = module, group
        self._sparse: dict[int, str] = {}

    def room(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        sparse = set(map(id, sparse_parameters(self._module)))
        return [0 if id(parameter) in sparse else parameter.numel() for parameter in parameters]

    def lay(self, buckets: Sequence[Bucket], parameters: Sequence[nn.Parameter]) -> None:
        super().lay(buckets, parameters)
        self._sparse = {
            span.parameter: span.name
            for bucket in buckets
            for span in bucket.spans
            if span.start == span.stop and parameters[span.parameter].numel()
        }

    def land(self, number: int, scale: float) -> None:
        if number not in self._sparse:
            super().land(number, scale)
            return
        parameter = self._parameters[number]
        if parameter.grad is None:
            return
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)  # tied to a layer with dense ones
        parameter.grad = gradient * scale if scale != 1 else gradient

    def deliver(self) -> None:
        for number, name in sorted(self._sparse.items()):
            self._parameters[number].grad = self._sum(self._parameters[number], name)

    def cleared(self, number: int, *, landing: bool) -> bool:
        return number not in self._sparse and super().cleared(number, landing=landing)

    def _sum(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        """All ranks' rows of one gradient; None where no rank has any."""
        place = f"for the rows of {name}"
        if parameter.grad is None:
            rows, values = parameter.new_zeros(0, dtype=torch.int64), parameter.detach()[:0]
        else:
            mine = parameter.grad.coalesce()
            rows, values = mine.indices()[0], mine.values()
        counts: list[int] = self._group.all_gather(torch.tensor(len(rows), device=rows.device), place=place).tolist()
        if self._group.size == 1 or not max(counts):
            return parameter.grad
        longest = max(counts)
        rows = nn.functional.pad(rows, (0, longest - len(rows)))
        values = torch.cat([values, values.new_zeros(longest - len(values), *values.shape[1:])])
        all_rows = self._group.all_gather(rows, place=place).split(longest)
        all_values = self._group.all_gather(values, place=place).split(longest)
        joined = torch.cat([piece[:count] for piece, count in zip(all_rows, counts, strict=True)])
        added = torch.cat([piece[:count] for piece, count in zip(all_values, counts, strict=True)])
        return torch.sparse_coo_tensor(joined[None], added, parameter.shape).coalesce()
