"""A small CNN on MNIST, read from the IDX files that MNIST comes in.

    lockstep train examples/mnist_idx.py --workers 2 --set folder=/data/mnist

The folder holds train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k- files, gzipped
(.gz) or not. PyTorch keeps a copy of them:

    mkdir -p data/mnist && cd data/mnist
    for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
        curl -O https://ossci-datasets.s3.amazonaws.com/mnist/$name-ubyte.gz
    done

A task says what would change the weights on one worker. The command says how many workers there
are.
"""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

SOURCE = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def read_idx(path: Path) -> Tensor:
    """One IDX file: two zero bytes, the type (8: unsigned byte), the number of dimensions, the
    sizes, then the bytes themselves.
    """
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        raise FileNotFoundError(
            f"{path} is missing, and so is {packed.name}. Download the four files of MNIST from"
            f" {SOURCE} into one folder, and name it: --set folder=FOLDER"
        )
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    zero, kind, dimensions = struct.unpack_from(">HBB", raw)
    if (zero, kind) != (0, 8):
        raise ValueError(
            f"{path} is no IDX file of bytes: it begins with {raw[:4].hex()}, not 0000 08"
        )
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    return torch.from_numpy(
        np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
    )


def split(folder: Path, name: str) -> TensorDataset:
    images = read_idx(folder / f"{name}-images-idx3-ubyte")
    labels = read_idx(folder / f"{name}-labels-idx1-ubyte")
    return TensorDataset((images[:, None].float() / 255 - 0.1307) / 0.3081, labels.long())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32 * 6 * 6, 10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def loss(output: Tensor, batch: Any) -> tuple[Tensor, float]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def metrics(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, float]]:
    return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}


def task(folder: str = "data/mnist", lr: float = 2e-3, epochs: int = 2) -> lockstep.Task:
    return lockstep.Task(
        model=Net,
        train_data=split(Path(folder), "train"),
        eval_data=split(Path(folder), "t10k"),
        loss=loss,
        metrics=metrics,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        global_batch=128,
        micro_batch=32,
        epochs=epochs,
    )
