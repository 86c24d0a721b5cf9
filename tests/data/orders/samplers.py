"""Samplers of users, at the top of a module so that ranks can import them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler


class Drawing(Sampler[int]):
    """Shuffles by one of the streams that a sampler may use: a library's global one, or a
    generator of its own.
    """

    def __init__(self, samples: int, stream: str) -> None:
        self.samples, self.stream = samples, stream
        own: dict[str, Any] = {
            "own torch": torch.Generator(),
            "own numpy": np.random.default_rng(),
            "own RandomState": np.random.RandomState(),
            "own random": random.Random(),
        }
        self.generator = own.get(stream)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.samples))
        if "torch" in self.stream:
            order = torch.randperm(self.samples, generator=self.generator).tolist()
        elif "numpy" in self.stream or "RandomState" in self.stream:
            (self.generator or np.random).shuffle(order)
        else:
            (self.generator or random).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.samples


STREAMS = ["torch", "numpy", "random", "own torch", "own numpy", "own RandomState", "own random"]


class Remembering(Sampler[Any]):
    """Yields other samples each time it is asked; as batches of one, if so wanted."""

    def __init__(self, batches: bool = False) -> None:
        self.batches, self.asked = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.asked += 1
        order = [(place + self.asked) % 8 for place in range(8)]
        return iter([[index] for index in order] if self.batches else order)


class Told(Sampler[Any]):
    """Epoch e: from e on, and nothing from `until` on."""

    def __init__(self, until: int = 10**9) -> None:
        self.epoch, self.until = 0, until

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(
            [] if self.epoch >= self.until else [(place + self.epoch) % 8 for place in range(8)]
        )


class Dealing(Sampler[Any]):
    """A batch sampler that deals out whole batches to ranks: number n goes to rank n mod
    num_replicas.
    """

    def __init__(self, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        return iter(
            [[2 * number, 2 * number + 1] for number in range(self.rank, 6, self.num_replicas)]
        )
