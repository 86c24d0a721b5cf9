"""What loops with `lockstep.prepare` are tested with: data, networks, and the same training on several
numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.teams import on_team

RANKS = (1, 2, 3)
SAMPLES = 100  # the last window has a full micro-batch and a short one


def samples(count: int = SAMPLES, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator).to(dtype)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def noisy_net() -> nn.Module:
    """With BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def state_of(*models: nn.Module) -> list[Tensor]:
    tensors = []
    for model in models:
        tensors += [tensor.detach().clone() for tensor in model.state_dict().values()]
    return tensors


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_on_all(train: Callable[..., list[Tensor]], ranks: tuple[int, ...] = RANKS) -> list[Tensor]:
    """Train on each of these numbers of ranks; all must have the same bits. Return them."""
    results = [result for size in ranks for result in on_team(train, size)]
    for result in results[1:]:
        assert equal(results[0], result)
    return results[0]
