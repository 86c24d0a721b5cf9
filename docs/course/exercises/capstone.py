"""Capstone: a complete data-parallel training.

Grade it with `pytest docs/course -k capstone`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def order(samples: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation of the samples. It is written for you."""
    generator = torch.Generator().manual_seed(1000 + epoch)
    return torch.randperm(samples, generator=generator).tolist()


def distributed_train(
    rank: int,
    world_size: int,
    epochs: int,
    *,
    init_method: str,
    dataset: Dataset[tuple[Tensor, Tensor]],
    model: nn.Module,
    global_batch: int,
    lr: float,
) -> list[float]:
    """Train `model` in place on all ranks, and return the mean loss of each epoch.

    Every rank calls this once. The result is that of one process, on any number of ranks:

    - Join a process group with the gloo backend, and leave it in every case, also if the dataset
      raises an exception.
    - The models of the ranks differ at first. Train the one of rank 0.
    - In epoch e the samples come in the order `order(len(dataset), e)`. A step takes the next
      `global_batch` of them; the last step takes what is left. Divide the samples of each step
      among the ranks. In a short step a rank may have none.
    - A step is plain SGD with `lr` on the mean cross-entropy over the samples of all ranks.
    - The loss of an epoch is the mean over its samples of the losses before each update. All ranks
      return it.

    Use the collectives of torch.distributed, or DistributedDataParallel. DDP averages the means of
    the ranks: think of what that does in a short step. Free it before the group.

    Args:
        rank: the number of this process.
        world_size: how many processes there are.
        epochs: how many times each sample is used.
        init_method: where the ranks meet, for init_process_group.
        dataset: `dataset[i]` is (input, label), `len(dataset)` the number of samples.
        model: returns logits, [samples, classes].
        global_batch: samples of a step, over all ranks.
        lr: the learning rate.
    """
    raise NotImplementedError
