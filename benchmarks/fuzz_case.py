"""A case of benchmarks/fuzz.py: one training, and how it is divided among ranks. Plain torch: the
oracle and the ranks read the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from fuzz_models import CLASSES, OPTIMIZERS, SCHEDULES, WIDTH, WORDS, Net, SparseNet, converted

STEPPERS = ("stepper, loader", "stepper, lists")
"""Doors whose steps are windows, with sums and weights."""
Windows = tuple[tuple[tuple[range, ...], ...], ...]
"""The samples of each micro-batch, by step and rank."""


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    words: Tensor
    shares: Tensor
    """The weight of each sample."""
    factors: Tensor
    """1, or nan where a sample's loss is nan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training."""

    seed: int
    ranks: int
    door: str
    blocks: tuple[str, ...]
    dtype: torch.dtype
    optimizer: str
    flags: dict[str, Any]
    groups: int
    schedule: str | None
    by_hand: bool
    """Whether the loop steps the schedule, after every step."""
    clip: float | None
    weighing: str
    """What a micro-batch's loss and weight are: count, shares, tensor, mean."""
    penalty: bool
    """Whether the loss holds a gradient, so that a backward goes through a backward."""
    samples: int
    windows: Windows
    sizes: dict[str, Any]
    """Arguments of the Loader."""
    frozen: dict[int, tuple[int, bool]]
    """By step: a block, and whether it is trained from this step on."""
    reload: int | None
    """The step before which all is built again, and its state loaded."""
    average: bool
    scaled: bool
    wrapped: bool
    by_all: bool
    """With join(), whether the mean is over all ranks, and not over those with inputs."""
    poisoned: tuple[int, ...]
    """Samples whose loss is nan."""
    empty: int | None
    """The step in which all weights are 0."""
    set_to_none: bool
    options: dict[str, Any]
    """Of the Stepper or the wrapper."""

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        said = {name: value for name, value in values.items() if value not in (None, False, (), {})}
        return ", ".join(f"{name}={value!r}" for name, value in said.items())

    @property
    def local(self) -> bool:
        return self.options.get("sync_every") is not None

    @property
    def approximate(self) -> bool:
        """Whether only the ranks can be compared: gradients are compressed too much, or parts of
        the model synchronize when their buckets do.
        """
        text = f"{self.options.get('compress')} {self.options.get('outer')}"
        return any(word in text for word in ("int8", "powersgd", "fragments"))

    @property
    def keyed(self) -> bool:
        """Whether the numbers that a forward draws are Lockstep's: the reference is one rank."""
        return "dropout" in self.blocks

    @property
    def tolerance(self) -> float:
        if self.options.get("compress") is not None:
            return 0.1
        if self.dtype is torch.bfloat16:
            return 0.2
        if self.optimizer == "muon":  # it computes in bfloat16
            return 0.05
        return 2e-3 if self.dtype is torch.float32 else 1e-7

    # -- what is trained --------------------------------------------------------------------------

    def model(self, seed: int = 0) -> nn.Module:
        if self.optimizer == "sparse adam":
            return converted(SparseNet(self.seed + seed), self.dtype)
        return converted(Net(self.blocks, self.seed + seed), self.dtype)

    def parts(self, model: nn.Module) -> list[dict[str, Any]]:
        """The optimizer's groups. An optimizer of matrices gets no others."""
        trained = list(model.parameters())
        if self.optimizer == "muon":
            trained = [each for each in trained if each.ndim == 2 and not each.is_complex()]
        if self.groups == 1 or len(trained) < 2:
            return [{"params": trained}]
        lr = OPTIMIZERS[self.optimizer][1]["lr"]
        return [{"params": trained[::2]}, {"params": trained[1::2], "lr": lr / 3}]

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parts(model), **options, **self.flags)

    def schedule_of(self, optimizer: Optimizer) -> Any:
        return None if self.schedule is None else SCHEDULES[self.schedule](optimizer)

    def average_of(self, model: nn.Module) -> AveragedModel | None:
        if not self.average:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def freeze(self, model: nn.Module, step: int) -> None:
        """Freeze or unfreeze what changes before this step."""
        if step in self.frozen:
            block, trains = self.frozen[step]
            model.blocks[block].requires_grad_(trains)  # type: ignore[index]

    # -- what it is trained on --------------------------------------------------------------------

    def data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(self.seed)
        count = self.samples
        shares = torch.randint(0, 4, (count,), generator=draw).double() / 2
        if self.empty is not None:
            for micros in self.windows[self.empty]:
                for samples in micros:
                    shares[list(samples)] = 0.0
        factors = torch.ones(count, dtype=torch.float64)
        factors[list(self.poisoned)] = torch.nan
        return TensorDataset(
            torch.randn(count, WIDTH, generator=draw, dtype=torch.float64).to(self.dtype),
            torch.randint(CLASSES, (count,), generator=draw),
            torch.randint(WORDS, (count,), generator=draw),
            shares,
            factors,
        )

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, float | Tensor]:
        """Return the loss and the weight, as the loop gives them to `backward`."""
        given = Batch(*batch)
        x = given.x.detach().clone().requires_grad_(self.penalty)
        output = model(x, given.words)
        each = F.cross_entropy(
            output.float() if self.dtype is torch.bfloat16 else output, given.y, reduction="none"
        )
        each = each * given.factors.to(each.dtype)
        if self.penalty:
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            each = each + 0.1 * slope.square().sum(1)
        if self.weighing == "count":
            return each.sum(), len(given.y)
        if self.weighing == "mean":
            return each.mean(), len(given.y)
        weight = given.shares.sum()
        total = (each * given.shares.to(each.dtype)).sum()
        return total, weight if self.weighing == "tensor" else float(weight)
