"""Data-parallel training with nothing but collectives: broadcast once, then average every gradient.

    lockstep run --workers 2 examples/gradients_by_hand.py

Data parallelism is no more than this. It is slow: it sends one message for each parameter, after
the backward pass and not during it. Buckets and overlap mend that. It must not skip a parameter: a
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
        parameter.grad /= world_size  # equal parts: else add up the weights too


def main() -> None:
    with lockstep.init() as world:
        model = nn.Linear(4, 1)  # other weights on each rank ...
        for tensor in model.state_dict().values():
            lockstep.collectives.broadcast(tensor)  # ... made equal to those of rank 0, once

        # one data set for all ranks, so it is drawn with one seed; a rank takes its part
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(120, 4, generator=generator).tensor_split(world.size)[world.rank]
        targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            average_gradients(model, world.size)
            optimizer.step()
            # every rank calls it, and rank 0 prints it
            mean = world.mean(loss.item(), weight=len(inputs))
            if world.rank == 0 and step % 5 == 4:
                print(f"step {step + 1}: loss {mean:.4f} over {world.size} ranks")

        weights = lockstep.collectives.all_gather(model.weight.detach())
        assert all(torch.equal(row, weights[0]) for row in weights), "the replicas differ"


if __name__ == "__main__":
    main()
