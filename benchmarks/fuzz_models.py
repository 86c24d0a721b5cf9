"""Models, optimizers and schedules that benchmarks/fuzz.py draws. Plain torch: the oracle and the
ranks build the same things.

Each block of a model maps [samples, 6] to [samples, 6]. No gradient of theirs is zero but for
rounding, which optimizers that divide by its size would turn into large steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, WORDS = 6, 3, 11


class Block(nn.Module):
    """`words` has a number for each sample."""

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.run(x, words)


class Dense(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Wide(Block):
    """Enough parameters that each rank has a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, WIDTH))

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Twice(Dense):
    """One layer, used twice in a forward."""

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return super().run(super().run(x, words), words)


class Tied(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer.weight = self.inner.weight

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.sin(self.outer(super().run(x, words)))


class Frozen(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Unused(Dense):
    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return x


class Branches(Block):
    """Each micro-batch uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)])

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.tanh(self.sides[int(words[0]) % 2](x))


class Odd(Block):
    """Parameters without dimensions, without elements, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 3)])

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return torch.sin(x @ self.turned[0]) * self.scale + self.empty.sum()


class Norm(Block):
    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self._shape = make(), shape

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.inner(x)
        if self._shape == (WIDTH, 3):  # of one sample, too
            wide = torch.stack([x, 0.5 * x.cos(), -x * x], 2)
            found: Tensor = self.norm(wide).sum(2)
            return torch.tanh(found)
        found = self.norm(x.reshape(-1, *self._shape))
        return torch.tanh(found.reshape(-1, WIDTH))


class Conv(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, (2, 3), padding=(0, 1), bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.last = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found = self.norm(self.conv(x.reshape(-1, 1, 2, 3)))
        return torch.tanh(self.last(found.flatten(1)))


class ConvChannelsLast(Conv):
    """Weights of four dimensions whose memory is in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1, bias=False)
        self.last = nn.Linear(4, WIDTH)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found = self.norm(self.conv(x.reshape(-1, 3, 1, 2)))
        return torch.tanh(self.last(found.flatten(1)))


class Recurrent(Block):
    def __init__(self, cell: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cell = cell(2, WIDTH, batch_first=True)

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.cell(x.reshape(-1, 3, 2))[0]
        return found[:, -1]


class Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, bias=False, batch_first=True)

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        three = x.reshape(-1, 3, 2)
        found: Tensor = self.attention(three, three, three, need_weights=False)[0]
        return x + found.reshape(-1, WIDTH)


class Complex(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)
        self.phase = nn.Parameter(torch.tensor(0.5 + 0.5j))

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        turned = x.to(self.weight.dtype) @ self.weight * self.phase
        return torch.tanh(turned.real + turned.imag * turned.imag)


class Embedded(Block):
    def __init__(self, *, sparse: bool, bag: bool = False) -> None:
        super().__init__()
        if bag:
            self.table: nn.Module = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=sparse)
        else:
            self.table = nn.Embedding(WORDS, WIDTH, padding_idx=2, sparse=sparse)
        self._bag = bag

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.table(bags(words) if self._bag else words)
        return torch.tanh(x + found)


class Weighted(Dense):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.inner)


class Checkpointed(Dense):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.more, self._reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.run, x, words, use_reentrant=self._reentrant)
        return found

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.more(super().run(x, words))
        return found


class Dropped(Dense):
    """Masks that every rank must draw alike."""

    def run(self, x: Tensor, words: Tensor) -> Tensor:
        return F.dropout(super().run(x, words), 0.4, self.training)


def bags(words: Tensor) -> Tensor:
    return torch.stack([words, (words * 3 + 1) % WORDS], 1)


_BLOCKS: dict[str, Callable[[], Block]] = {
    "dense": Dense,
    "wide": Wide,
    "wide again": Wide,
    "wide, too": Wide,
    "twice": Twice,
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    "branches": Branches,
    "odd": Odd,
    "batch norm": lambda: Norm(lambda: nn.BatchNorm1d(WIDTH), (WIDTH, 3)),
    "batch norm, mean of all": lambda: Norm(
        lambda: nn.BatchNorm1d(WIDTH, momentum=None), (WIDTH, 3)
    ),
    "batch norm, bare": lambda: Norm(lambda: nn.BatchNorm1d(WIDTH, affine=False), (WIDTH, 3)),
    "layer norm": lambda: Norm(lambda: nn.LayerNorm(WIDTH), (WIDTH,)),
    "group norm": lambda: Norm(lambda: nn.GroupNorm(2, WIDTH), (WIDTH,)),
    "instance norm": lambda: Norm(
        lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True), (2, 3)
    ),
    "conv": Conv,
    "conv, channels last": ConvChannelsLast,
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "attention": Attention,
    "complex": Complex,
    "embedding": lambda: Embedded(sparse=False),
    "embedding, sparse": lambda: Embedded(sparse=True),
    "embedding bag, sparse": lambda: Embedded(sparse=True, bag=True),
    "weight norm": Weighted,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "checkpoint, reentrant": lambda: Checkpointed(reentrant=True),
    "dropout": Dropped,
}
BLOCKS = tuple(_BLOCKS)


class Net(nn.Module):
    def __init__(self, blocks: Iterable[str], seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList([_BLOCKS[name]() for name in blocks])
            self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, words)
        found: Tensor = self.last(x)
        return found


class SparseNet(nn.Module):
    """For optimizers that only take sparse gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.table = nn.EmbeddingBag(WORDS, CLASSES, mode="sum", sparse=True)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.table(bags(words))
        return found


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert real and complex parameters; keep the layout of memory."""
    wide = {torch.float64: torch.complex128}.get(dtype, torch.complex64)

    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(wide)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(convert)
    return model


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd, momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd, nesterov": (SGD, {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    "sgd, dampening, maximize": (
        SGD,
        {"lr": 1e-3, "momentum": 0.8, "dampening": 0.3, "maximize": True},
    ),
    "adam": (ADAM, {"lr": 0.01, "eps": 1e-3}),
    "adam, amsgrad": (ADAM, {"lr": 0.01, "eps": 1e-3, "amsgrad": True, "weight_decay": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-3}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "t0": 2.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "muon": (torch.optim.Muon, {"lr": 0.01}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1}),
    "sparse adam": (torch.optim.SparseAdam, {"lr": 0.01, "eps": 1e-3}),
}

FUSED = ("sgd", "sgd, momentum", "sgd, nesterov", "adam", "adam, amsgrad", "adamw", "adagrad")
CYCLED = ("sgd, momentum", "sgd, nesterov", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop")
"""Those with a momentum that a schedule may change."""

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    "warmup": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2),
            lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        milestones=[2],
    ),
}
