"""Any tensor that torch trains: complex, 0-d, empty, bfloat16, tied, of a subclass, and with sparse
gradients. Wherever Lockstep walks over tensors (the norm, digests, slices, buckets, checkpoints, the
hook), two ranks end with the weights of plain torch in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from tests.teams import on_team

STEPS, RATE, CLIP = 4, 0.05, 3.0


class Marked(torch.Tensor):
    """A subclass of torch's tensor."""


class Kinds(nn.Module):
    """One parameter of each kind. `rows` are looked up with sparse gradients."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)

        def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=dtype)

        self.spectrum = nn.Parameter(drawn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(drawn())
        self.nothing = nn.Parameter(drawn(0, 3))
        self.low = nn.Parameter(drawn(4).bfloat16())
        self.marked = nn.Parameter(drawn(2).as_subclass(Marked))
        self.tied, self.again = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.tied.weight.copy_(drawn(3, 3))
        self.again.weight = self.tied.weight
        self.rows = nn.Embedding.from_pretrained(drawn(5, 2), freeze=False, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the losses of samples x, shape [n, 3]."""
        twice = self.again(self.tied(x)).square().sum()
        looked_up = self.rows(torch.arange(len(x)) % 5).square().sum()
        others = [self.spectrum.abs(), self.scale, self.nothing, self.low.float(), self.marked]
        return twice + looked_up + x.sum() * sum(each.square().sum() for each in others)


def batch(rank: int, step: int) -> Tensor:
    """Rank 1 has more samples than rank 0, and none in step 2."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(0 if (rank, step) == (1, 2) else 2 + rank, 3, generator=draw)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def expected(*, mean: bool) -> dict[str, Tensor]:
    """Plain torch in one process: the mean over all samples, clipped; or, as torch's wrapper has it,
    the mean of the ranks' sums.
    """
    model = Kinds(sparse=False)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [batch(rank, step) for rank in range(2)]
        for x in batches:
            model(x).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        for gradient in gradients:
            gradient /= sum(map(len, batches)) if mean else 2
        if mean:
            norm = (
                sum(float(each.detach().abs().double().square().sum()) for each in gradients) ** 0.5
            )
            for gradient in gradients:
                gradient *= min(1.0, CLIP / (norm + 1e-6))
        optimizer.step()
    return values(model)


def stepped(
    world: lockstep.World, folder: str | None, options: dict[str, Any]
) -> dict[str, Tensor]:
    """With a Stepper; with a folder, in two halves with a checkpoint between them."""
    for begin, end in ((0, STEPS),) if folder is None else ((0, 2), (2, STEPS)):
        model = Kinds(sparse=True)
        stepper = lockstep.Stepper(model, sgd(model), clip=CLIP, world=world, **options)
        saving = None if folder is None else lockstep.Checkpoints(folder, stepper, every=2)
        if saving is not None:
            saving.resume()
            assert stepper.steps == begin
        for step in range(begin, end):
            x = batch(world.rank, step)
            for each in stepper.micro_batches([x] if len(x) else []):
                stepper.backward(model(each), weight=len(each))
            stepper.step()
            if saving is not None:
                saving.step()
        stepper.check_replicas()
        if saving is not None:
            saving.close()
    return values(model)


def wrapped(world: lockstep.World, kind: str) -> dict[str, Tensor]:
    """With torch's wrapper and our hook, or with ours."""
    model = Kinds(sparse=False)
    ddp: Any
    if kind == "hook":
        ddp = nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, lockstep.shared_memory_hook)
    else:
        ddp = lockstep.DistributedDataParallel(model, world=world)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(world.rank, step)).backward()
        optimizer.step()
    return values(model)


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The rounding of bfloat16 reaches the others through the norm."""
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        bound = 0.02 if value.dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(value, wanted[name], rtol=bound, atol=bound)


@pytest.mark.filterwarnings("ignore:the gradient of 'rows.weight' is sparse")
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce": "native"}, {"update": "sharded"}, {"reduce": "ring"}],
    ids=str,
)
def test_a_stepper_and_its_checkpoints(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = expected(mean=True)
    for folder in (None, str(tmp_path)):
        for found in on_team(stepped, 2, (folder, options)):
            close(found, wanted)


@pytest.mark.parametrize("kind", ["hook", "wrapper"])
def test_wrappers(kind: str) -> None:
    for found in on_team(wrapped, 2, (kind,)):
        close(found, expected(mean=False))
