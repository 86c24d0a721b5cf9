"""Scripts of hosts (Accelerate, Lightning, transformers) under `lockstep run`, what their ranks
leave, and the training that some have in common.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

Ranks = list[dict[str, Any]]
SAMPLES, RATE = 83, 0.05


def run(script: Path, workers: int, folder: Path) -> Ranks:
    """What each rank has left in `folder`, as WORKERS-RANK.json."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--workers", str(workers), str(script), folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{workers}-{rank}.json").read_text()) for rank in range(workers)]


def joined(ranks: Ranks, of: str) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    steps = zip(*(rank[of]["seen"] for rank in ranks), strict=True)
    return [list(chain.from_iterable(step)) for step in steps]


def data(count: int = SAMPLES) -> TensorDataset:
    """Inputs, classes, and which sample it is."""
    x = torch.randn(count, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1), torch.arange(count))


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    between = nn.BatchNorm1d(32) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(10, 32), between, nn.ReLU(), nn.Linear(32, 3))


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def close(values: Sequence[Any], expected: Iterable[Tensor]) -> None:
    """What a rank has left, and tensors of this process."""
    for ours, theirs in zip(values, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-5)


def one_process(
    loader: lockstep.Loader,
    *,
    norm: bool = False,
    weighing: bool = False,
    accumulate: int = 1,
    gamma: float = 1.0,
) -> tuple[list[Tensor], list[list[int]], list[float]]:
    """Two epochs in a plain loop: the weights at the end, the samples of each window, and the last
    rate.

    Args:
        loader: of one rank.
        norm: whether the net normalizes.
        weighing: whether class 0 counts for nothing.
        accumulate: windows of a step.
        gamma: by which the rate falls in each step.
    """
    model = net(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    seen = []
    for epoch in loader.epochs(2):
        weight = 0
        for number, window in enumerate(epoch):
            seen.append([int(index) for *_, indices in window for index in indices])
            for x, y, _ in window:
                counted = y > 0 if weighing else y >= 0
                F.cross_entropy(model(x), y, reduction="none")[counted].sum().backward()
                weight += int(counted.sum())
            if (number + 1) % accumulate == 0 or number + 1 == len(epoch):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= weight
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                weight = 0
    return list(model.parameters()), seen, scheduler.get_last_lr()
