"""The task `digits`: real handwritten digits, and a small CNN with BatchNorm and dropout. It is the
smallest task that behaves like a big one.

The data are scikit-learn's bundled 8x8 scans (1797, from the UCI repository's "Optical Recognition
of Handwritten Digits", Alpaydin and Kaynak, 1998), so nothing is downloaded. A step has eight
micro-batches, so up to eight workers have work.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.runtime.extras import install
from lockstep.tasks.warmup import warmup_and_cosine

_SPLIT_SEED = 0


class Net(nn.Module):
    """A CNN: [batch, 1, 8, 8] -> [batch, 10]. Its convolutions have no bias, because BatchNorm
    would remove it.
    """

    def __init__(self, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def task(
    *,
    epochs: int = 12,
    lr: float = 6e-3,
    seed: int = 0,
    global_batch: int = 64,
    micro_batch: int = 8,
    width: int = 32,
    dropout: float = 0.25,
    smoothing: float = 0.1,
) -> Task:
    """Return the task. Each argument can be set with --set key=value. `lr` is the peak learning
    rate, after the first quarter of the steps.
    """

    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    train_data, eval_data = datasets()
    return Task(
        name="digits",
        model=lambda: Net(width, dropout),
        train_data=train_data,
        eval_data=eval_data,
        loss=partial(loss, smoothing=smoothing),
        metrics=metrics,
        optimizer=optimizer,
        scheduler=partial(warmup_and_cosine, warmup=0.25),
        global_batch=global_batch,
        micro_batch=micro_batch,
        eval_micro_batch=45,
        epochs=epochs,
        seed=seed,
        best="accuracy",
        best_mode="max",
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor], smoothing: float) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies, and the number of digits. `smoothing` is the part of
    each label that is spread over all ten classes: it reduces overfitting to the few images.
    """
    labels = batch[1]
    total = F.cross_entropy(output, labels, reduction="sum", label_smoothing=smoothing)
    return total, len(labels)


def metrics(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return the accuracy: (digits whose largest output is the right one, number of digits)."""
    labels = batch[1]
    correct = (output.argmax(1) == labels).sum()
    return {"accuracy": (correct, len(labels))}


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return (train, evaluation): images [n, 1, 8, 8] between 0 and 1, labels [n]. Raises TaskError
    if scikit-learn is not installed.
    """
    pixels, labels = _scans()
    images = torch.tensor(pixels, dtype=torch.float32).div_(16).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    train, held_out = map(torch.from_numpy, split(labels))
    train_data = TensorDataset(images[train], targets[train])
    return train_data, TensorDataset(images[held_out], targets[held_out])


def _scans() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return pixels [n, 64] from 0 to 16 and labels [n], as sklearn.datasets.load_digits does. An
    import of scikit-learn would take each rank over a second.
    """
    spec = find_spec("sklearn")  # finds the package without importing it
    folders = None if spec is None else spec.submodule_search_locations
    for folder in folders or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",", encoding="utf-8")
            return table[:, :-1], table[:, -1].astype(np.int64)
    raise TaskError(
        "missing-extra", what="digits", package="scikit-learn", install=install("tasks")
    )


def split(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of 80 % of each class for training and 20 % for evaluation. They are the
    same on every machine.
    """
    random = np.random.Generator(np.random.PCG64(_SPLIT_SEED))
    held_out = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        held_out.append(members[: round(0.2 * len(members))])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
