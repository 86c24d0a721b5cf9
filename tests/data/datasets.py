"""Data sets for the loader's tests, at the top of a module so that any process can import them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def draws() -> Tensor:
    """One number from each of the three libraries."""
    return torch.tensor(
        [torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64
    )


class Numbers(Dataset[Any]):
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return index


class Augmented(Numbers):
    """Sample i is (i, what the three libraries draw while it is fetched)."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, draws()


class AtOnce(Augmented):
    """Fetches a list of samples in one call, and no single one."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[int, Tensor]]:
        return [(index, draws()) for index in indices]

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        raise AssertionError("a single sample was asked for")


class Broken(Numbers):
    """Raises for one sample."""

    def __init__(self, samples: int, bad: int) -> None:
        super().__init__(samples)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise KeyError("the user's own error")
        return index


class Counted(Numbers):
    """Keeps what was fetched; for loading in this process."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class WorkerPids(Numbers):
    """Sample i is the pid of who fetched it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid() if get_worker_info() is not None else 0


class Sleeping(Numbers):
    """Prints which process fetches, and never finishes."""

    def __getitem__(self, index: int) -> Any:
        print(os.getpid(), flush=True)
        time.sleep(600)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def with_draws(samples: list[Any]) -> tuple[list[Any], Tensor]:
    """A collate function that draws, as those that mask tokens or mix images do."""
    return samples, draws()


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Moody(Numbers):
    """Sample i draws from one library only where `draws_from` names it: {index: "torch" |
    "numpy" | "normal" | "random" | "gauss"}.
    """

    def __init__(self, samples: int, draws_from: dict[int, str]) -> None:
        super().__init__(samples)
        self.draws_from = draws_from

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, draw_from(self.draws_from.get(index))


DRAWS: dict[str | None, Callable[[], float]] = {
    None: lambda: 0.0,
    "torch": lambda: torch.rand(()).item(),
    "torch-normal": lambda: torch.randn(()).item(),
    "numpy": lambda: float(np.random.rand()),
    "normal": lambda: float(np.random.standard_normal()),
    "random": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1),
}


def draw_from(library: str | None) -> float:
    return DRAWS[library]()


class Leaving(Numbers):
    """The process that fetches one sample dies of a signal, or leaves with an exit code."""

    def __init__(self, samples: int, bad: int, signal: int = 0, code: int = 0) -> None:
        super().__init__(samples)
        self.bad, self.signal, self.code = bad, signal, code

    def __getitem__(self, index: int) -> int:
        if index == self.bad and get_worker_info() is not None:
            if self.signal:
                os.kill(os.getpid(), self.signal)
            os._exit(self.code)
        return index


class Lambda(Numbers):
    """Cannot be pickled."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.function = lambda index: index


class Pairs:
    """An order of batches: epoch e has 3 + e micro-batches; number n holds n + 1 samples, from n
    on.
    """

    def __init__(self, name: str = "pairs") -> None:
        self.name = name

    def count(self, epoch: int) -> int:
        return 3 + epoch

    def batch(self, epoch: int, number: int) -> Any:
        return np.arange(number, 2 * number + 1, dtype=np.int64)

    def fingerprint(self) -> str:
        return self.name


class Backwards:
    """An order: from the last sample to the first. With a digest, as foreign samplers have it."""

    def __init__(self, samples: int, digests: dict[int, str] | None = None) -> None:
        self.samples = samples
        self.digests = digests or {}

    def at(self, epoch: int, positions: Any) -> Any:
        return self.samples - 1 - positions

    def fingerprint(self) -> str:
        return "backwards"

    def digest(self, epoch: int) -> str:
        return self.digests.get(epoch, f"digest {epoch}")
