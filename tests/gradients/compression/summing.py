"""Tensors of given shapes summed by a reduction over some steps, without a model: what several
tests here do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.config.parallelism import Compression
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.compression import compressed
from lockstep.gradients.layout import Entry, plan

EVERY = ("bf16", "fp16", "int8", "powersgd:2")
OWING = EVERY[2:]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a vector, a 0-d and an empty one, a channels_last kernel, a transposed matrix,
    one that is not dense.
    """
    return [
        nn.Parameter(torch.zeros(40, 30, dtype=dtype)),
        nn.Parameter(torch.zeros(300, dtype=dtype)),
        nn.Parameter(torch.zeros((), dtype=dtype)),
        nn.Parameter(torch.zeros(0, 5, dtype=dtype)),
        nn.Parameter(torch.zeros(16, 8, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(20, 50, dtype=dtype).t()),
        nn.Parameter(torch.zeros(30, 40, dtype=dtype)[:, ::2]),
    ]


class Summing:
    """`bucket`: bytes. Small ones, so that there are several."""

    def __init__(
        self, group: Group, text: str, given: Sequence[nn.Parameter], *, bucket: int = 2048
    ) -> None:
        self.given = list(given)
        self.reduction = compressed(Compression.read(text), group)
        self._bucket = bucket
        self.lay(range(len(self.given)))

    def lay(self, order: Sequence[int]) -> None:
        entries = [
            Entry(f"p{number}", each.numel(), each.dtype, each.device)
            for number, each in enumerate(self.given)
        ]
        layout = plan(entries, list(order), bucket=self._bucket, first_bucket=self._bucket)
        memory = self.reduction.memory(layout)
        self.buckets = [
            Bucket(each, self.given, room)
            for each, room in zip(layout.buckets, memory, strict=True)
        ]

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, by parameter."""
        for bucket in self.buckets:
            for span, view in zip(bucket.spans, bucket.views, strict=True):
                view.copy_(gradients[span.parameter])
            if bucket.flag is not None:
                bucket.flag.fill_(1e6)  # it is no gradient, and must not travel
        works = [self.reduction.start(bucket) for bucket in self.buckets]
        for work in works:
            work.wait()
        found = {
            span.parameter: view.clone()
            for bucket in self.buckets
            for span, view in zip(bucket.spans, bucket.views, strict=True)
        }
        assert self.buckets[-1].flag is not None
        assert (
            self.buckets[-1].flag.item()
            == torch.tensor(1e6, dtype=self.buckets[-1].sum.dtype).item()
        )
        return [found[number] for number in range(len(self.given))]

    def owed(self) -> list[Tensor]:
        """By parameter, in its shape."""
        _, own = self.reduction.kept()
        found = []
        for number, each in enumerate(self.given):
            flat = own.get(f"error/p{number}", torch.zeros(0, dtype=each.dtype))
            place = (
                torch.empty_like(each.detach()) if flat.numel() else torch.zeros_like(each.detach())
            )
            if flat.numel():
                bucket = next(
                    each
                    for each in self.buckets
                    if number in [span.parameter for span in each.spans]
                )
                view = bucket.views[[span.parameter for span in bucket.spans].index(number)]
                place = flat.as_strided(view.shape, view.stride(), flat.storage_offset()).clone()
            found.append(place)
        return found


def gradients_of(rank: int, step: int, given: Sequence[Tensor]) -> list[Tensor]:
    """Other ones on every rank and in every step, of very different sizes; those of matrices
    have a few strong directions.
    """
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = []
    for number, each in enumerate(given):
        noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
        if each.dim() > 1 and each.numel():
            fixed = torch.Generator().manual_seed(number)
            strong = torch.randn(
                each.shape[0], 1, generator=fixed, dtype=torch.float64
            ) @ torch.randn(1, each.numel() // each.shape[0], generator=fixed, dtype=torch.float64)
            noise = 0.3 * noise + strong.view(each.shape)
        found.append((noise * 10.0 ** (number - 3)).to(each.dtype))
    return found


def true_sum(ranks: int, step: int, given: Sequence[Tensor]) -> list[Tensor]:
    everyone = [gradients_of(rank, step, given) for rank in range(ranks)]
    return [
        torch.stack([each.double() for each in theirs]).sum(0)
        for theirs in zip(*everyone, strict=True)
    ]
