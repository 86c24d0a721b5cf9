"""`DistributedSampler(shuffle=True)` gives the same order in every epoch.

https://github.com/pytorch/pytorch/issues/31232

The order depends on `set_epoch`. A loop that does not call it repeats its first epoch, and nothing
says so.

The line: `lockstep.Loader(data, global_batch=8)` for the sampler and its DataLoader. Its epochs
are numbered by the Loader, and each has an order of its own.

    lockstep run --workers 2 examples/upstream/pytorch_31232.py
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

DATA = TensorDataset(torch.arange(64))


def described(orders: list[list[int]]) -> str:
    """How many places of the first epoch have the same sample in the second, on this rank."""
    first, second = orders
    same = sum(one == other for one, other in zip(first, second, strict=True))
    return f"{same} of {len(first)} places have the same sample in epochs 0 and 1"


def before(world: lockstep.World) -> str:
    loader = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, shuffle=True))
    return described([[int(sample) for (batch,) in loader for sample in batch] for _ in range(2)])


def after(world: lockstep.World) -> str:
    loader = lockstep.Loader(DATA, global_batch=8)
    return described(
        [
            [int(sample) for window in epoch for (batch,) in window for sample in batch]
            for epoch in loader.epochs(2)
        ]
    )


if __name__ == "__main__":
    with lockstep.init() as world:
        for half in (before, after):
            line = half(world)
            if world.rank == 0:
                print(f"{half.__name__}: {line}")
