"""The classic script: a sampler, a wrapped model, and otherwise the training loop of one process.

    lockstep run --workers 2 examples/data_parallel.py

It runs unchanged under torchrun, mpirun and plain python (one rank).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)  # seeded: every process builds the same data set
    inputs = torch.randn(512, 10, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].sum(1, keepdim=True).sin())


def main() -> None:
    with lockstep.init() as world:
        data = dataset()
        sampler = lockstep.DistributedSampler(data, shuffle=True, drop_last=True)
        loader = DataLoader(data, batch_size=32, sampler=sampler)

        net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1)).to(world.device)
        model = lockstep.DistributedDataParallel(net)  # equal on all ranks from here on
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        for epoch in range(5):
            sampler.set_epoch(epoch)
            total = torch.zeros(())
            for inputs, targets in loader:
                inputs, targets = inputs.to(world.device), targets.to(world.device)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()  # the gradients are averaged over all ranks when this returns
                optimizer.step()
                total += loss.detach().cpu()
            mean = world.mean(total.item() / len(loader), weight=len(sampler))
            if world.rank == 0:
                print(f"epoch {epoch}: loss {mean:.4f}, {world.size} ranks x 32 samples a step")


if __name__ == "__main__":
    main()
