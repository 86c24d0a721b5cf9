"""Tensors of given shapes summed by a reduction over some steps, without a model."""

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
    """Also 0-d, empty, channels_last, transposed and not dense."""
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
            Entry(f"p{number}", parameter.numel(), parameter.dtype, parameter.device)
            for number, parameter in enumerate(self.given)
        ]
        layout = plan(entries, list(order), bucket=self._bucket, first_bucket=self._bucket)
        memory = self.reduction.memory(layout)
        self.buckets = [
            Bucket(bucket, self.given, part)
            for bucket, part in zip(layout.buckets, memory, strict=True)
        ]

    def views(self) -> dict[int, Tensor]:
        """The place of each parameter's sum."""
        views: dict[int, Tensor] = {}
        for bucket in self.buckets:
            numbers = [span.parameter for span in bucket.spans]
            views.update(zip(numbers, bucket.views, strict=True))
        return views

    def __call__(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all ranks, by parameter."""
        views, flag = self.views(), self.buckets[-1].flag
        for number, view in views.items():
            view.copy_(gradients[number])
        assert flag is not None
        flag.fill_(1e6)  # it is no gradient, and must not travel
        before = flag.clone()
        works = [self.reduction.start(bucket) for bucket in self.buckets]
        for work in works:
            work.wait()
        assert torch.equal(flag, before)
        return [views[number].clone() for number in range(len(self.given))]

    def owed(self) -> list[Tensor]:
        """By parameter, in its shape."""
        _, own = self.reduction.kept()
        views, owed = self.views(), []
        for number, parameter in enumerate(self.given):
            flat, view = own.get(f"error/p{number}"), views[number]
            if flat is None or not flat.numel():
                owed.append(torch.zeros_like(parameter.detach()))
                continue
            shaped = flat.as_strided(view.shape, view.stride(), flat.storage_offset())
            owed.append(shaped.clone())
        return owed


def gradients_of(rank: int, step: int, given: Sequence[Tensor]) -> list[Tensor]:
    """Others on every rank and in every step, of very different sizes, with a strong direction."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradients = []
    for number, like in enumerate(given):
        noise = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        if like.dim() > 1 and like.numel():
            fixed = torch.Generator().manual_seed(number)
            left = torch.randn(like.shape[0], 1, generator=fixed, dtype=torch.float64)
            right = torch.randn(
                1, like.numel() // like.shape[0], generator=fixed, dtype=torch.float64
            )
            noise = 0.3 * noise + (left @ right).view(like.shape)
        gradients.append((noise * 10.0 ** (number - 3)).to(like.dtype))
    return gradients


def true_sum(ranks: int, step: int, given: Sequence[Tensor]) -> list[Tensor]:
    by_rank = [gradients_of(rank, step, given) for rank in range(ranks)]
    return [torch.stack(gradients).double().sum(0) for gradients in zip(*by_rank, strict=True)]
