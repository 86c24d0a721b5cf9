"""The task `text`: a byte-level GPT on the source of Python's standard library, which every machine
that runs it has.

The model has about a million parameters and GPT-2's architecture (Radford et al., 2019):
pre-normalisation, learned positions, GELU. Whole files are held out for evaluation, chosen by their
names, so the model has seen no line of them.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from lockstep.config.parts import Parts
from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.tasks.warmup import warmup_and_cosine

# folders with installed packages, tests or tables
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
_EVERY = 10  # one file in ten is held out
_FROM_EACH = 16_384  # bytes at most from each file, so that no long file dominates the text
_HEADS = 4
TENSOR = {
    "blocks.*.heads": "colwise",
    "blocks.*.mixed": "rowwise",
    "blocks.*.layer.0": "colwise",
    "blocks.*.layer.2": "rowwise",
}
"""How tensor parallelism divides the layers: by attention heads, and by the hidden units between
the two matrices of `layer`.
"""


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """A text as pairs of [length] bytes and the next byte of each. Sequences are adjacent and do
    not overlap.
    """

    def __init__(self, text: bytes, length: int) -> None:
        self._bytes = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self._length = length

    def __len__(self) -> int:
        return max(0, len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        piece = self._bytes[index * self._length : (index + 1) * self._length + 1].long()
        return piece[:-1], piece[1:]


class GPTBlock(nn.Module):
    """Causal self-attention, then two linear layers on each position; each is added to its input.

    The rows of `heads` are sorted by head, [heads, 3, width of a head], so that tensor parallelism
    can divide them into whole heads.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.heads = nn.Linear(width, 3 * width, bias=False)
        self.mixed = nn.Linear(width, width, bias=False)
        self.layer_norm = nn.LayerNorm(width)
        self.layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # all heads, or this rank's heads with tensor parallelism
        heads = self.heads(self.attention_norm(x)).view(batch, length, -1, 3, width // _HEADS)
        queries, keys, values = heads.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=True
        )
        x = x + F.dropout(self.mixed(seen.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.layer(self.layer_norm(x)), dropout)


class GPT(nn.Module):
    """A GPT: bytes [batch, length] -> logits of the next byte [batch, length, 256]."""

    def __init__(self, width: int, depth: int, length: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[GPTBlock(width, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Position embeddings begin at 0: the bytes themselves are more useful, and learned first.
        nn.init.zeros_(self.positions.weight)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.norm(self.blocks(self.bytes(text) + self.positions(places)))
        logits: Tensor = self.head(x)
        return logits


def task(
    *,
    epochs: int = 1,
    lr: float = 2e-3,
    seed: int = 0,
    global_batch: int = 16,
    micro_batch: int = 2,
    length: int = 128,
    width: int = 160,
    depth: int = 3,
    dropout: float = 0.0,
    train_bytes: int = 1_200_000,
    eval_bytes: int = 131_072,
) -> Task:
    """Return the task. Each argument can be set with --set key=value. `lr` is the peak learning
    rate: it rises for a twentieth of the steps, then falls to a tenth of the peak.
    """
    if width % _HEADS:
        raise TaskError("width-not-divisible", width=width, heads=_HEADS)
    train_text, eval_text = texts(train_bytes, eval_bytes)

    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)

    return Task(
        name="text",
        model=lambda: GPT(width, depth, length, dropout),
        train_data=Sequences(train_text, length),
        eval_data=Sequences(eval_text, length),
        loss=loss,
        metrics=metrics,
        optimizer=optimizer,
        scheduler=partial(warmup_and_cosine, warmup=0.05, floor=0.1),
        clip=1.0,
        global_batch=global_batch,
        micro_batch=micro_batch,
        eval_micro_batch=16,
        epochs=epochs,
        seed=seed,
        best="bits_per_byte",
        best_mode="min",
        parts=Parts(tensor=TENSOR, heads=_HEADS),
    )


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the cross-entropies in nats, and the number of predicted bytes."""
    targets = batch[1].flatten()
    return F.cross_entropy(output.flatten(0, 1), targets, reduction="sum"), len(targets)


def metrics(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Return bits_per_byte: the cross-entropy in bits. A uniform guess has 8."""
    nats, weight = loss(output, batch)
    return {"bits_per_byte": (nats / math.log(2), weight)}


def texts(train_bytes: int, eval_bytes: int, root: Path | None = None) -> tuple[bytes, bytes]:
    """Return (train, evaluation): the beginnings of the library's files, concatenated in an order
    that mixes packages.

    `train_bytes` and `eval_bytes` are the largest sizes. The files depend on the Python version.
    Raises TaskError if the library's source is not installed.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    limits = (train_bytes, eval_bytes)
    parts = (bytearray(), bytearray())
    for key, file in files(root):
        number = int(key % _EVERY == 0)
        room = limits[number] - len(parts[number])
        if room > 0:
            parts[number].extend(file.read_bytes()[: min(room, _FROM_EACH)])
        if all(len(part) >= limit for part, limit in zip(parts, limits, strict=True)):
            break
    train, held_out = map(bytes, parts)
    if not train or not held_out:
        raise TaskError("too-few-source-files", folder=root)
    return train, held_out


def files(root: Path) -> list[tuple[int, Path]]:
    """Return the library's files, each with a hash of its name, sorted by these hashes. Tests and
    installed packages are left out.
    """
    keyed = []
    for folder, subfolders, names in os.walk(root):
        # Other folders are not searched: installed packages may be much larger than the library.
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        for name in names:
            if name.endswith(".py"):
                file = Path(folder, name)
                digest = hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()
                keyed.append((int.from_bytes(digest[:8]), file))
    return sorted(keyed)
