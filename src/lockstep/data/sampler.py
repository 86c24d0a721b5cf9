"""A distributed sampler in one readable file: which indices of a data set are this rank's, for a plain DataLoader.

    10 samples, 4 ranks         interleaved (torch's)         blocks
    padded by the head          rank 0   0 4 8                0 1 2
    to 12 so that all ranks     rank 1   1 5 9                3 4 5
    have equally many           rank 2   2 6 0                6 7 8
                                rank 3   3 7 1                9 0 1

Blocks keep neighbours together, which reads files faster; with sorted, unshuffled data they give every rank other classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Literal, cast

import torch
from torch.utils.data import Dataset, Sampler

from lockstep.errors import UsageError
from lockstep.place import rank_and_size

Split = Literal["interleaved", "blocks"]


class DistributedSampler(Sampler[int]):
    """torch's DistributedSampler, index for index, with `split="blocks"` besides.

    Every rank draws the same order from (seed + epoch), pads it by repeating it from its head until it divides by the number of ranks (or,
    with `drop_last`, cuts it until it does), and takes its part. `num_replicas` and `rank` default to torch's process group's; call
    `set_epoch` before each epoch, or every epoch repeats the first one's order.

    Padding trains some samples twice, and in an evaluation counts them twice: a `lockstep.Loader` needs none, advances the epoch by itself
    and gives the same batches at every world size. Raises UsageError for ranks that do not exist, an unknown split and an empty dataset.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        split: Split = "interleaved",
    ) -> None:
        default_rank, default_replicas = rank_and_size() if num_replicas is None or rank is None else (rank, num_replicas)
        self.num_replicas = default_replicas if num_replicas is None else num_replicas
        self.rank = default_rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(f"rank={self.rank} and num_replicas={self.num_replicas}: ranks go from 0 to num_replicas - 1")
        if split not in ("interleaved", "blocks"):
            raise UsageError(f"split={split!r}: choose 'interleaved' or 'blocks'")
        self.dataset = dataset
        self.samples = len(cast(Sized, dataset))
        if self.samples == 0:
            raise UsageError("the dataset is empty: there is nothing to sample from")
        self.shuffle, self.seed, self.drop_last, self.split = shuffle, seed, drop_last, split
        self.epoch = 0
        if drop_last:
            self.num_samples = self.samples // self.num_replicas
        else:
            self.num_samples = -(-self.samples // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next: the order is a function of seed and epoch. Iterating does not advance it."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The padded (or cut) order of this epoch, the same on all ranks."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(self.samples, generator=generator).tolist()
        else:
            indices = list(range(self.samples))
        repeats = -(-self.total_size // self.samples)  # as often as needed: one more copy of the head is not enough for 1 sample on 4 ranks
        return (indices * repeats)[: self.total_size]

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        if self.split == "blocks":
            return iter(order[self.rank * self.num_samples : (self.rank + 1) * self.num_samples])
        return iter(order[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        """Indices of this rank."""
        return self.num_samples
