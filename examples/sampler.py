"""Which samples does each rank get? A distributed sampler, used by hand.

    lockstep run --workers 4 examples/sampler.py

Every rank draws from the same shuffled order and takes its part of it. `set_epoch` changes the
order: without it every epoch repeats the first. The order is padded by its own head so that all
ranks have equally many samples.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def main() -> None:
    dataset = TensorDataset(torch.arange(10))
    with lockstep.init() as world:
        for split in ("interleaved", "blocks"):
            sampler = lockstep.DistributedSampler(dataset, shuffle=False, split=split)
            mine = torch.tensor(list(sampler))
            everyone = lockstep.collectives.all_gather(mine).view(world.size, -1)
            if world.rank == 0:
                print(
                    f"{split}: "
                    + "  ".join(f"rank {rank} {row}" for rank, row in enumerate(everyone.tolist()))
                )

        sampler = lockstep.DistributedSampler(dataset, shuffle=True, seed=0)
        loader = DataLoader(dataset, batch_size=2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)  # another order each epoch, the same on all ranks
            seen = torch.cat([batch for (batch,) in loader])
            covered = lockstep.collectives.all_gather(seen).unique().numel()
            print(
                f"epoch {epoch}: rank {world.rank} trained on {seen.tolist()}; all ranks together"
                f" on {covered} of {len(dataset)}"
            )


if __name__ == "__main__":
    main()
