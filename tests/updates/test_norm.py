"""The norm by which gradients are clipped is torch's: of complex parameters too, however the
gradients are summed and spread over the ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.testing import run_ranks
from lockstep.updates.norm import SplitNorm

METHODS: list[dict[str, Any]] = [
    {},
    {"update": "sharded"},
    {"exact": True},
    {"exact": True, "update": "sharded"},
    {"reduce": "native"},
    {"reduce": "ring", "update": "sharded"},
]


class Mixed(nn.Module):
    """Several blocks of gradients of each dtype, whose squares have a negative real part."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, dtype in (
            ("complex_double", torch.complex128),
            ("complex_single", torch.complex64),
            ("single", torch.float32),
        ):
            value = torch.randn(700, 5, dtype=dtype, generator=random)
            setattr(self, name, nn.Parameter(value * (1j if dtype.is_complex else 1)))

    def forward(self, x: Tensor) -> Tensor:
        squares = [(each @ x.to(each.dtype).t()).abs().square() for each in self.parameters()]
        return sum(each.sum().double() for each in squares)  # type: ignore[return-value]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Mixed()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def clipped(world: lockstep.World, method: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    model, optimizer = made()
    stepper = lockstep.Stepper(model, optimizer, clip=0.5, **method)
    loader = lockstep.Loader(TensorDataset(data()), global_batch=6, micro_batch=2, seed=0)
    norms = []
    for epoch in loader.epochs(3):
        for window in epoch:
            for (x,) in stepper.micro_batches(window):
                stepper.backward(model(x), weight=len(x))
            result = stepper.step()
            assert result.norm is not None
            norms.append(result.norm)
    return norms, [each.detach() for each in model.parameters()]


def clipped_by_every_method(world: lockstep.World) -> Any:
    return [clipped(world, method) for method in METHODS]


def data() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def clipped_by_torch() -> tuple[list[float], list[Tensor]]:
    model, optimizer = made()
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        (model(data()) / 6).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return norms, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_complex_gradients_are_clipped_as_torch_clips_them(workers: int) -> None:
    norms, weights = clipped_by_torch()
    for rank in run_ranks(clipped_by_every_method, workers):
        for method, (found, parameters) in zip(METHODS, rank, strict=True):
            assert found == pytest.approx(norms, rel=1e-5), method
            for ours, theirs in zip(parameters, weights, strict=True):
                torch.testing.assert_close(ours, theirs, msg=str(method))
        (replicated, _), (sharded, _), (exact, _), (exact_sharded, _), *_ = rank
        assert (sharded, exact_sharded) == (replicated, exact)  # the same bits


class OneGradient:
    spread = ()
    device = torch.device("cpu")

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def named(self) -> list[tuple[str, Tensor]]:
        return [("weight", self._gradient)]


def test_the_norm_of_a_split_model_counts_both_parts_of_a_complex_number() -> None:
    gradient = torch.tensor([3 + 4j, 12j], dtype=torch.complex64)
    with lockstep.init() as world:
        norm = SplitNorm(world.group, lambda name: True)
        assert norm(OneGradient(gradient), 2.0).item() == 6.5  # type: ignore[arg-type]
