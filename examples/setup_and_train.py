"""setup, train and cleanup as functions, with ranks that this script spawns itself.

    python examples/setup_and_train.py 2

No launcher: `mp.spawn` starts the ranks and gives each its number. `lockstep.init(rank,
world_size)` lets them find each other on this host without a fixed port, and adapts to the hardware
(NCCL and cuda:local_rank with GPUs, Gloo without).
"""

import sys

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def setup(rank: int, world_size: int, backend: str | None = None) -> lockstep.World:
    return lockstep.init(rank=rank, world_size=world_size, backend=backend)


def train(rank: int, world_size: int, epochs: int = 3) -> None:
    with setup(rank, world_size) as world:
        # leaving the block is the cleanup, also after an exception
        generator = torch.Generator().manual_seed(0)
        # seeded: unseeded, every rank would have another data set
        inputs = torch.randn(1000, 10, generator=generator)
        # something to learn; the bare sum of the outputs would have no minimum
        targets = inputs.roll(1, dims=1)
        loader = lockstep.Loader(
            TensorDataset(inputs, targets), global_batch=32 * world_size, micro_batch=32
        )

        model = nn.Linear(10, 10).to(world.device)
        stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in loader.epochs(epochs):
            for window in epoch:
                for x, y in stepper.micro_batches(window):
                    stepper.backward(
                        nn.functional.mse_loss(model(x), y, reduction="sum"), weight=y.numel()
                    )
                result = stepper.step()
            if world.rank == 0:  # the loss is already that of all ranks
                print(f"epoch {epoch.number}: loss {result.loss:.4f}")


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(train, args=(world_size,), nprocs=world_size, join=True)
