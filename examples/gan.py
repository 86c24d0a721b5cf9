"""A GAN: two models, two optimizers, and two Steppers that walk the same window.

    lockstep run --workers 2 examples/gan.py

The discriminator learns from a window, then the generator from the same one. Each Stepper has a
seed of its own, so that the noise differs. The generator's BatchNorm keeps the statistics of its own
window; what it does in the discriminator's leaves no trace. The weights are the same bits with any
number of workers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checks.identity import sha256, weights

NOISE = 8


def points(count: int) -> TensorDataset:
    """Around eight centres on a circle."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.randint(8, (count,), generator=generator) * (math.pi / 4)
    centres = torch.stack([angles.cos(), angles.sin()], 1)
    return TensorDataset(centres + 0.05 * torch.randn(count, 2, generator=generator))


def mlp(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), norm(64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), norm(64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)),
    )


def train(epochs: int = 4) -> str:
    """Train both; their weights' SHA-256."""
    lockstep.seed(0)
    generator, discriminator = mlp(NOISE, 2, nn.BatchNorm1d), mlp(2, 1, nn.Identity)
    makes, judges = (
        lockstep.Stepper(
            model,
            torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            seed=seed,
            exact=True,
        )
        for seed, model in enumerate((generator, discriminator))
    )

    def fake(real: Tensor) -> Tensor:
        made: Tensor = generator(torch.randn(len(real), NOISE, device=real.device))
        return made

    loader = lockstep.Loader(points(2048), global_batch=128, micro_batch=16, seed=0)
    for epoch in loader.epochs(epochs):
        for window in epoch:
            for (real,) in judges.micro_batches(window):
                made = fake(real).detach()
                loss = F.softplus(-discriminator(real)) + F.softplus(discriminator(made))
                judges.backward(loss.sum(), weight=len(real))
            judged = judges.step()
            discriminator.requires_grad_(False)  # the generator's backward goes through it
            for (real,) in makes.micro_batches(window):
                loss = F.softplus(-discriminator(fake(real)))
                makes.backward(loss.sum(), weight=len(real))
            made_step = makes.step()
            discriminator.requires_grad_(True)
    if makes.world.rank == 0:
        print(f"losses: discriminator {judged.loss:.4f}, generator {made_step.loss:.4f}")
    return sha256(weights(nn.ModuleList([generator, discriminator])))


if __name__ == "__main__":
    with lockstep.init() as world:
        digest = train()
        if world.rank == 0:
            print(f"{world.size} workers, weights sha256 {digest}")
