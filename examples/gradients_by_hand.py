"""Data-parallel training with nothing but collectives: broadcast once, then average every gradient.

    lockstep run --workers 2 examples/gradients_by_hand.py

This is all that data parallelism is. It is slow (one message a parameter, after the backward
instead of during it), which is what buckets and overlap repair; and it must not skip parameters: a
rank that has no gradient sends zeros.
"""

import torch
from torch import nn

import lockstep


def average_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            # `if grad is not None: all_reduce` would pair different parameters on different ranks
            parameter.grad = torch.zeros_like(parameter)
        lockstep.collectives.all_reduce(parameter.grad)
        parameter.grad /= world_size  # a sum is not a mean


def main() -> None:
    with lockstep.init() as world:
        torch.manual_seed(world.rank)  # every rank begins differently ...
        model = nn.Linear(4, 1)
        for tensor in model.state_dict().values():
            lockstep.collectives.broadcast(tensor)  # ... and is made equal to rank 0, once

        inputs = torch.randn(64, 4)  # this rank's own samples
        targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            average_gradients(model, world.size)
            optimizer.step()
            # every rank calls it, rank 0 prints it
            mean = world.mean(loss.item(), weight=len(inputs))
            if world.rank == 0 and step % 5 == 4:
                print(f"step {step + 1}: loss {mean:.4f} over {world.size} ranks")

        weights = lockstep.collectives.all_gather(model.weight.detach())
        assert all(torch.equal(row, weights[0]) for row in weights), "the replicas differ"


if __name__ == "__main__":
    main()
