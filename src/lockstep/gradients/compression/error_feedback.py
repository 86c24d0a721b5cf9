"""What compression has left out so far, added to the next step's gradient: error feedback (Karimireddy et al., ICML 2019).

    to send    = gradient + owed
    owed       = to send - what was sent of it         on every rank for itself

So nothing is lost, it comes later: after any number of steps the sum of what was applied and of what all ranks owe is the sum of all gradients.

What is owed is in the unit of gradients as they are sent: sums over a step's micro-batches, that the Stepper divides by the step's own
weight. What a full step owes is therefore worth more in a short last step (divided by less), and what a short step owes less in a full one;
with steps of equal weight nothing of it is seen. A loss scaler, whose unit changes, is refused by the Stepper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.gradients.layout import BucketPlan, Layout, Span

_NAME = "error/"


def working(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of a dtype are added and remembered: float32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Owed:
    """One flat tensor a bucket. It belongs to parameters: buckets may be laid anew.

    A parameter that is no longer trained is owed nothing any more.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._plans: tuple[BucketPlan, ...] = ()
        self._flats: list[Tensor] = []

    def lay(self, layout: Layout) -> None:
        """Follow the buckets."""
        before = self._by_parameter()
        self._plans = layout.buckets
        self._flats = [torch.zeros(plan.numel, dtype=working(plan.dtype), device=plan.device) for plan in layout.buckets]
        for name, there in self._by_parameter().items():
            if name in before and before[name].shape == there.shape:
                there.copy_(before[name])

    def of(self, bucket: int, numel: int) -> Tensor:
        """What this rank owes of the first `numel` elements of a bucket."""
        return self._flats[bucket][:numel]

    def kept(self) -> dict[str, Tensor]:
        """Of this rank, by the names of parameters, flat."""
        return {_NAME + name: owed for name, owed in self._by_parameter().items() if owed.numel()}

    def take_back(self, by_rank: Sequence[Mapping[str, Tensor]]) -> None:
        """What every rank owed then. With fewer ranks now, one takes over the debts of several; with more, the new ones owe nothing."""
        ours = by_rank[self._group.rank :: self._group.size]
        for name, there in self._by_parameter().items():
            there.zero_()
            for theirs in ours:
                if _NAME + name in theirs:
                    there += theirs[_NAME + name].to(there.device)

    def _by_parameter(self) -> dict[str, Tensor]:
        def place(flat: Tensor, span: Span) -> Tensor:
            return flat[span.start : span.stop]

        return {span.name: place(flat, span) for plan, flat in zip(self._plans, self._flats, strict=True) for span in plan.spans}
