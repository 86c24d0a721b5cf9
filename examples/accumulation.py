"""Gradient accumulation: a global batch larger than memory, cut into micro-batches; the update does
not notice.

    lockstep run --workers 2 examples/accumulation.py

A window holds the micro-batches of one optimizer step. No modulo decides when to step and when to
communicate, the short last window steps with its true weight, and nothing is divided by hand.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    # 300 = 4 x 64 + 44: the last window is short
    inputs = torch.randn(300, 10, generator=generator)
    data = TensorDataset(inputs, (inputs[:, 0] > inputs[:, 1]).long())

    with lockstep.init() as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)).to(world.device)
        stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), clip=1.0)
        # 8 micro-batches a step, shared among the ranks
        loader = lockstep.Loader(data, global_batch=64, micro_batch=8)
        if world.rank == 0:
            print(loader.describe())

        for epoch in loader.epochs(3):
            for window in epoch:
                for x, y in stepper.micro_batches(window):
                    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                    stepper.backward(loss, weight=len(y))
                result = stepper.step()
            if world.rank == 0:
                print(
                    f"epoch {epoch.number}: loss {result.loss:.4f}; the last step had"
                    f" {result.weight:.0f} samples, {result.samples_by_rank} by rank"
                )


if __name__ == "__main__":
    main()
