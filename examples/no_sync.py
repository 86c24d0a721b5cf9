"""Accumulation with the wrapper: `no_sync()` keeps the gradients at home until the last micro-batch
of a window.

    lockstep run --workers 2 examples/no_sync.py

Which backward communicates must be the one right before the optimizer step: the last of the window,
not the first, and the last of the epoch too. Counting with a modulo gets this wrong easily
(replicas drift apart, silently), so this loop walks windows; a Stepper needs no such care.
"""

from contextlib import nullcontext

import torch
from torch import nn

import lockstep

WINDOW = 4


def main() -> None:
    with lockstep.init() as world:
        torch.manual_seed(world.rank)
        batches = [torch.randn(8, 6) for _ in range(10)]  # 10 = 4 + 4 + 2: the last window is short
        net = nn.Linear(6, 1)
        model = lockstep.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        for start in range(0, len(batches), WINDOW):
            window = batches[start : start + WINDOW]
            optimizer.zero_grad()
            for place, x in enumerate(window):
                last = place == len(window) - 1
                with nullcontext() if last else model.no_sync():
                    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                    (loss / len(window)).backward()
            optimizer.step()
            print(
                f"rank {world.rank}: stepped after {len(window)} micro-batches, loss"
                f" {loss.item():.4f}"
            )

        weights = lockstep.collectives.all_gather(net.weight.detach())
        assert all(torch.equal(row, weights[0]) for row in weights), "the replicas differ"


if __name__ == "__main__":
    main()
