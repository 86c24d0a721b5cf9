"""Accumulation with the wrapper: `no_sync()` sends no gradients before the last micro-batch of a
window.

    lockstep run --workers 2 examples/no_sync.py

The backward that communicates must be the one right before the optimizer step: the last of each
window, also of the short window at the end. A modulo over the batches gets this wrong easily, and
the replicas drift apart silently. So this loop walks windows. A Stepper does it by itself.
"""

from contextlib import nullcontext

import torch
from torch import nn

import lockstep

MICRO_BATCH, WINDOW = 8, 4


def main() -> None:
    with lockstep.init() as world:
        lockstep.seed(0)  # the same data and the same weights on every rank
        inputs = torch.randn(10 * MICRO_BATCH * world.size, 6)
        # this rank's part: 10 micro-batches = 4 + 4 + 2, so the last window is short
        batches = inputs.chunk(world.size)[world.rank].split(MICRO_BATCH)
        net = nn.Linear(6, 1)
        model = lockstep.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        for start in range(0, len(batches), WINDOW):
            window = batches[start : start + WINDOW]
            optimizer.zero_grad()
            total = 0.0
            for place, x in enumerate(window):
                last = place == len(window) - 1
                with nullcontext() if last else model.no_sync():
                    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
                    (loss / len(window)).backward()
                total += loss.item() / len(window)
            optimizer.step()
            # every rank calls it, and rank 0 prints it
            mean = world.mean(total, weight=len(window) * MICRO_BATCH)
            if world.rank == 0:
                print(f"stepped after {len(window)} micro-batches a rank, loss {mean:.4f}")

        weights = lockstep.collectives.all_gather(net.weight.detach())
        assert all(torch.equal(row, weights[0]) for row in weights), "the replicas differ"


if __name__ == "__main__":
    main()
