"""A distributed sampler in one readable file: the indices of a data set that belong to this rank,
for a plain DataLoader.

    10 samples, 4 ranks:        interleaved (torch's)         blocks
    padded to 12 with the       rank 0   0 4 8                0 1 2
    first samples, so that      rank 1   1 5 9                3 4 5
    all ranks have equally      rank 2   2 6 0                6 7 8
    many                        rank 3   3 7 1                9 0 1

Blocks keep neighbours together, so files are read faster. With sorted, unshuffled data, blocks give
every rank different classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lockstep.config.knob import chosen
from lockstep.errors import UsageError
from lockstep.runtime.environment import rank_and_size

Split = Literal["interleaved", "blocks"]


class DistributedSampler(Sampler[int]):
    """torch's DistributedSampler, index for index, with `split="blocks"` in addition.

    Every rank draws the same order from seed + epoch. The order is padded with its own first
    indices until the number of ranks divides its length, or cut with `drop_last`. Each rank takes
    its part.

    Prefer a `lockstep.Loader`: it advances the epoch by itself, gives the same batches at every
    world size, and needs no padding. Padding trains some samples twice, and counts them twice in an
    evaluation.

    Example::

        sampler = lockstep.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in loader:
                ...

    Args:
        dataset: map-style; only its length is used.
        num_replicas: the number of ranks. Default: torch's process group's, 1 without one.
        rank: this process's number. Default: torch's process group's, 0 without one.
        shuffle: use another order in every epoch.
        seed: decides the orders, together with the epoch. Equal on all ranks.
        drop_last: leave out up to num_replicas - 1 samples an epoch. DataLoader's own `drop_last`
            leaves out the short last batch.
        split: "interleaved": rank r has every num_replicas-th sample; "blocks": one block for each
            rank.

    Raises:
        UsageError: a rank that does not exist, an unknown split, or a dataset that is empty or has
            no length.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        split: Split = "interleaved",
    ) -> None:
        if num_replicas is None or rank is None:
            default_rank, default_replicas = rank_and_size()
            rank = default_rank if rank is None else rank
            num_replicas = default_replicas if num_replicas is None else num_replicas
        self.num_replicas = num_replicas
        self.rank = rank
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(
                "no-such-rank", rank=self.rank, name="num_replicas", size=self.num_replicas
            )
        chosen("split", split, get_args(Split))
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                "not-a-loaders-dataset",
                what=type(dataset).__name__,
                needs="__len__ and __getitem__",
            )
        self.dataset = dataset
        self.samples = len(dataset)
        if self.samples == 0:
            raise UsageError("empty-dataset", name="the dataset")
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.split = split
        self.epoch = 0
        rounding = 0 if drop_last else self.num_replicas - 1
        self.num_samples = (self.samples + rounding) // self.num_replicas
        self.total_size = self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch. Call it before each epoch: without it all epochs have
        the same order.

        Args:
            epoch: from 0; the order is a function of seed + epoch.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # past the end, the order repeats from its start
        positions = self._positions() % self.samples
        if not self.shuffle:
            return iter(positions.tolist())
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator)
        return iter(order[positions].tolist())

    def _positions(self) -> Tensor:
        """Return this rank's positions in the padded (or cut) order."""
        numbers = torch.arange(self.num_samples)
        if self.split == "blocks":
            return numbers + self.rank * self.num_samples
        return numbers * self.num_replicas + self.rank

    def __len__(self) -> int:
        """Return the number of this rank's indices, the same on all ranks."""
        return self.num_samples
