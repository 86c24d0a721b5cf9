"""Sequence packing: several sequences in a row, none of which sees another, weighted by tokens.

    lockstep train examples/packing.py --workers 2 --exact
    lockstep train examples/packing.py --workers 2 --exact --set order=length

With order=length a micro-batch holds sequences of similar lengths, as many as a budget of tokens
allows. The loss is divided by the real tokens of the whole step, not by rows or by ranks.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import StackDataset

import lockstep
from lockstep.data.orders import ByLength

VOCABULARY, ROW = 32, 48


def sequences(count: int, seed: int) -> Any:
    """Arithmetic progressions modulo the size of the vocabulary, 4 to 24 tokens long."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, 25, (count, 3), generator=generator).tolist()
    return StackDataset([(a + b * torch.arange(size)) % VOCABULARY for a, b, size in drawn])  # type: ignore[arg-type]  # a list is a data set


def packed(samples: list[tuple[Tensor]]) -> Tensor:
    """Sequences -> [3, rows, ROW]: tokens, positions, and a sequence's number (0: padding)."""
    rows, room = [], 0
    for number, (tokens,) in enumerate(samples, 1):
        if len(tokens) > room:
            rows.append(torch.zeros(3, ROW, dtype=torch.long))
            room = ROW
        piece = rows[-1][:, ROW - room : ROW - room + len(tokens)]
        piece[:] = torch.stack([tokens, torch.arange(len(tokens)), torch.full_like(tokens, number)])
        room -= len(tokens)
    return torch.stack(rows, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 64), nn.Embedding(ROW, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor, places: Tensor, sequence: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        # of the same sequence, and not later
        seen = (sequence[:, :, None] == sequence[:, None]).tril().repeat_interleave(4, 0)
        logits: Tensor = self.head(x + self.attention(x, x, x, attn_mask=~seen)[0])
        return logits


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    tokens, _, sequence = batch
    real = (sequence[:, 1:] == sequence[:, :-1]) & (sequence[:, 1:] > 0)
    nats = F.cross_entropy(output[:, :-1][real], tokens[:, 1:][real], reduction="sum")
    return nats, real.sum()


def task(order: Literal["shuffled", "length"] = "shuffled") -> lockstep.Task:
    train = sequences(512, seed=0)
    by_length = ByLength([len(tokens) for (tokens,) in train], tokens=96, seed=0)
    return lockstep.Task(
        model=Model,
        train_data=train,
        eval_data=sequences(128, seed=1),
        collate=packed,
        inputs=tuple,  # tokens, positions, numbers
        loss=loss,
        order=(lambda data: by_length) if order == "length" else None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        global_batch=32,
        micro_batch=8,
        epochs=2,
    )
