"""What a seed of benchmarks/fuzz.py draws: one training, and how it is divided among ranks. Plain
torch: the oracle and the ranks read the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from fuzz_models import (
    BLOCKS,
    CLASSES,
    CYCLED,
    FUSED,
    OPTIMIZERS,
    SCHEDULES,
    WIDTH,
    WORDS,
    Net,
    SparseNet,
    converted,
)

STEPPERS = ("stepper, loader", "stepper, lists")
WRAPPERS = ("wrapper", "join", "sharded optimizer", "hook", "backend")
_DOORS = (*STEPPERS * 4, *WRAPPERS, "wrapper")
Windows = tuple[tuple[tuple[range, ...], ...], ...]
"""The samples of each micro-batch, by step and rank."""


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    words: Tensor
    shares: Tensor
    """The weight of each sample."""
    factors: Tensor
    """1, or nan where a sample's loss is nan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training."""

    seed: int
    ranks: int
    door: str
    blocks: tuple[str, ...]
    dtype: torch.dtype
    optimizer: str
    flags: dict[str, Any]
    groups: int
    schedule: str | None
    by_hand: bool
    """Whether the loop steps the schedule, after every step."""
    clip: float | None
    weighing: str
    """What a micro-batch's loss and weight are: count, shares, tensor, mean."""
    penalty: bool
    """Whether the loss holds a gradient, so that a backward goes through a backward."""
    samples: int
    windows: Windows
    sizes: dict[str, Any]
    """Arguments of the Loader."""
    frozen: dict[int, tuple[int, bool]]
    """By step: a block, and whether it is trained from this step on."""
    reload: int | None
    """The step before which all is built again, and its state loaded."""
    average: bool
    scaled: bool
    wrapped: bool
    by_all: bool
    """With join(), whether the mean is over all ranks, and not over those with inputs."""
    poisoned: tuple[int, ...]
    """Samples whose loss is nan."""
    empty: int | None
    """The step in which all weights are 0."""
    set_to_none: bool
    options: dict[str, Any]
    """Of the Stepper or the wrapper."""

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        said = {name: value for name, value in values.items() if value not in (None, False, (), {})}
        return ", ".join(f"{name}={value!r}" for name, value in said.items())

    @property
    def local(self) -> bool:
        return self.options.get("sync_every") is not None

    @property
    def approximate(self) -> bool:
        """Whether only the ranks can be compared: gradients are compressed too much, or parts of
        the model synchronize when their buckets do.
        """
        text = f"{self.options.get('compress')} {self.options.get('outer')}"
        return any(word in text for word in ("int8", "powersgd", "fragments"))

    @property
    def keyed(self) -> bool:
        """Whether the numbers that a forward draws are Lockstep's: the reference is one rank."""
        return "dropout" in self.blocks

    @property
    def tolerance(self) -> float:
        if self.options.get("compress") is not None:
            return 0.1
        if self.dtype is torch.bfloat16:
            return 0.2
        if self.optimizer == "muon":  # it computes in bfloat16
            return 0.05
        return 2e-3 if self.dtype is torch.float32 else 1e-7

    # -- what is trained --------------------------------------------------------------------------

    def model(self, seed: int = 0) -> nn.Module:
        if self.optimizer == "sparse adam":
            return converted(SparseNet(self.seed + seed), self.dtype)
        return converted(Net(self.blocks, self.seed + seed), self.dtype)

    def parts(self, model: nn.Module) -> list[dict[str, Any]]:
        """The optimizer's groups. An optimizer of matrices gets no others."""
        trained = list(model.parameters())
        if self.optimizer == "muon":
            trained = [each for each in trained if each.ndim == 2 and not each.is_complex()]
        if self.groups == 1 or len(trained) < 2:
            return [{"params": trained}]
        lr = OPTIMIZERS[self.optimizer][1]["lr"]
        return [{"params": trained[::2]}, {"params": trained[1::2], "lr": lr / 3}]

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        kind, options = OPTIMIZERS[self.optimizer]
        return kind(self.parts(model), **options, **self.flags)

    def schedule_of(self, optimizer: Optimizer) -> Any:
        return None if self.schedule is None else SCHEDULES[self.schedule](optimizer)

    def average_of(self, model: nn.Module) -> AveragedModel | None:
        if not self.average:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def freeze(self, model: nn.Module, step: int) -> None:
        """Freeze or unfreeze what changes before this step."""
        if step in self.frozen:
            block, trains = self.frozen[step]
            model.blocks[block].requires_grad_(trains)  # type: ignore[index]

    # -- what it is trained on --------------------------------------------------------------------

    def data(self) -> TensorDataset:
        draw = torch.Generator().manual_seed(self.seed)
        count = self.samples
        shares = torch.randint(0, 4, (count,), generator=draw).double() / 2
        if self.empty is not None:
            for micros in self.windows[self.empty]:
                for samples in micros:
                    shares[list(samples)] = 0.0
        factors = torch.ones(count, dtype=torch.float64)
        factors[list(self.poisoned)] = torch.nan
        return TensorDataset(
            torch.randn(count, WIDTH, generator=draw, dtype=torch.float64).to(self.dtype),
            torch.randint(CLASSES, (count,), generator=draw),
            torch.randint(WORDS, (count,), generator=draw),
            shares,
            factors,
        )

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, float | Tensor]:
        """Return the loss and the weight, as the loop gives them to `backward`."""
        given = Batch(*batch)
        x = given.x.detach().clone().requires_grad_(self.penalty)
        output = model(x, given.words)
        each = F.cross_entropy(
            output.float() if self.dtype is torch.bfloat16 else output, given.y, reduction="none"
        )
        each = each * given.factors.to(each.dtype)
        if self.penalty:
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            each = each + 0.1 * slope.square().sum(1)
        if self.weighing == "count":
            return each.sum(), len(given.y)
        if self.weighing == "mean":
            return each.mean(), len(given.y)
        weight = given.shares.sum()
        total = (each * given.shares.to(each.dtype)).sum()
        return total, weight if self.weighing == "tensor" else float(weight)


def drawn(seed: int) -> Case:
    """Return the case of a seed."""
    chance = Random(seed)
    ranks = chance.choice((1, 2, 2, 3, 3, 4))
    door = chance.choice(_DOORS)
    idle = chance.random() < 0.45
    stepper = door in STEPPERS
    options = _stepper_options(chance, door, ranks) if stepper else _wrapper_options(chance, door)
    values = _training(chance, door, options)
    sizes, windows = _windows(chance, door, ranks, idle=idle, local="sync_every" in options)
    samples = sizes.get("samples", 0)
    for window in windows:
        samples = max(samples, *(each.stop for micros in window for each in micros))
    values |= _events(chance, door, values, options, len(windows), samples)
    return Case(
        seed=seed,
        ranks=ranks,
        door=door,
        windows=windows,
        samples=samples,
        sizes=sizes,
        options=options,
        **values,
    )


def _training(chance: Random, door: str, options: dict[str, Any]) -> dict[str, Any]:
    dtype = chance.choice((torch.float64,) * 6 + (torch.float32,) * 3 + (torch.bfloat16,))
    optimizer = chance.choice(tuple(OPTIMIZERS))
    divided = options.get("update") in ("sharded", "server")
    refused = ("lbfgs", "sparse adam", *(("adafactor", "muon") if divided else ()))
    if optimizer in refused and chance.random() < 0.8:
        optimizer = "sgd, momentum"
    if optimizer == "rprop" and dtype is not torch.float64:
        optimizer = "adamw"  # it looks at signs
    blocks = tuple(chance.choice(BLOCKS) for _ in range(chance.randrange(4)))
    if dtype is torch.bfloat16:
        blocks = tuple(each for each in blocks if each not in ("complex",))
    if door != "stepper, loader" or "sync_every" in options:  # noise that one rank draws too
        blocks = tuple(each for each in blocks if each != "dropout")
    if door == "hook" or door == "backend":  # torch's wrapper cannot
        blocks = tuple(each for each in blocks if each != "checkpoint, reentrant")
    if optimizer == "sparse adam":
        blocks = ()
    if optimizer == "adafactor":  # it divides by the number of elements, and takes no complex ones
        blocks = tuple(each for each in blocks if each not in ("odd", "complex"))
    has_sparse = any("sparse" in each for each in blocks)
    if has_sparse and door not in STEPPERS:  # torch's optimizers of sparse gradients
        optimizer = chance.choice(("sgd", "adagrad"))
    flags: dict[str, Any] = {}
    if optimizer not in ("adafactor", "muon", "lbfgs", "sparse adam") and chance.random() < 0.5:
        flags["foreach"] = chance.random() < 0.5
    plain = not has_sparse and "complex" not in blocks
    # torch 2.13: fused SGD with momentum of bfloat16 on a CPU is wrong
    if optimizer in FUSED and plain and dtype is not torch.bfloat16 and chance.random() < 0.4:
        flags = {"fused": True}
    schedules = [name for name in SCHEDULES if name != "one cycle" or optimizer in CYCLED]
    return {
        "dtype": dtype,
        "optimizer": optimizer,
        "blocks": blocks,
        "flags": flags,
        "groups": 1 if optimizer == "lbfgs" else chance.choice((1, 1, 2)),
        "schedule": chance.choice((None, *schedules)),
        "clip": chance.choice((None, None, 0.05, 1.0, float("inf"))),
        "weighing": chance.choice(("count", "count", "shares", "tensor", "mean")),
        "penalty": "checkpoint, reentrant" not in blocks
        and "attention" not in blocks  # torch has no second derivative of it
        and optimizer != "sparse adam"
        and dtype is not torch.bfloat16  # in 8 bits its rounding is as large as itself
        and chance.random() < 0.08,
    }


def _stepper_options(chance: Random, door: str, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reduces = ("native", "central", "ring", "tree", "halving_doubling", "shared_memory")
    kind = chance.choice(
        ("plain", "plain", "sharded", "exact", "exact", "local", "compress", "server")
    )
    if kind in ("exact", "server") and door != "stepper, loader" and chance.random() < 0.95:
        kind = chance.choice(("plain", "sharded"))
    if kind in ("plain", "sharded", "local") and chance.random() < 0.6:
        found["reduce"] = chance.choice(reduces)
    if kind == "sharded" or (kind in ("exact", "compress") and chance.random() < 0.4):
        found["update"] = "sharded"
        found["weights"] = chance.choice(("auto", "shared", "separate"))
    if kind == "exact":
        found["exact"] = True
        found["reduce"] = chance.choice(("auto", "auto", "native", "shared_memory"))
        if ranks > 1 and chance.random() < 0.3:
            found["witness"] = chance.choice((0.5, 1.0))
    elif kind == "local":
        found["sync_every"] = chance.choice((1, 2, 3))
        found["outer"] = chance.choice(
            (
                None,
                "average",
                "nesterov",
                "average:after=2",
                "nesterov:lr=0.5",
                "nesterov:fragments=2",
            )
        )
        if found["sync_every"] == 1 and "fragments" in str(found["outer"]):
            found["sync_every"] = 2
    elif kind == "compress":
        found["compress"] = chance.choice(("bf16", "fp16", "int8", "powersgd:2"))
    elif kind == "server":
        found["update"], found["staleness"] = "server", 0
    found["unused"] = chance.choice(("error", "zeros", "zeros", "skip", "skip"))
    if kind == "server" and chance.random() < 0.95:
        found["unused"] = "zeros"
    if chance.random() < 0.04:  # most likely refused
        found |= chance.choice(
            (
                {"exact": True},
                {"compress": "bf16"},
                {"sync_every": 2},
                {"reduce": "ring"},
                {"update": "sharded"},
            )
        )
    found["checks"] = chance.choice(("full", "full", "start", "off"))
    found["trace_nonfinite"] = chance.random() < 0.2
    if chance.random() < 0.5:
        found["bucket_mb"] = chance.choice((1e-5, 2e-4, 1e-3))
    return found


def _wrapper_options(chance: Random, door: str) -> dict[str, Any]:
    found: dict[str, Any] = {"find_unused_parameters": chance.random() < 0.7}
    if chance.random() < 0.5:
        found["bucket_cap_mb"] = chance.choice((1e-5, 2e-4, 1e-3))
    elif chance.random() < 0.2:
        found["bucket_cap_mb_list"] = [1e-5, 2e-4]
    if door in ("hook", "backend"):
        return found | {"find_unused_parameters": True}
    reduces = ("native", "central", "ring", "tree", "halving_doubling", "shared_memory")
    if chance.random() < 0.6:
        found["reduce"] = chance.choice(reduces)
    found["checks"] = chance.choice(("full", "full", "start", "off"))
    if chance.random() < 0.2:
        found["forward_sync_buffers"] = False
    if chance.random() < 0.2:
        found["static_graph"] = True
    return found


def _windows(
    chance: Random, door: str, ranks: int, *, idle: bool, local: bool
) -> tuple[dict[str, Any], Windows]:
    """Return the Loader's sizes, and the samples of each micro-batch, by step and rank."""
    if door == "stepper, loader":
        slots = chance.randrange(1, max(2, ranks)) if idle else chance.randrange(1, 9)
        micro = chance.randrange(1, 5)
        # the last micro-batch of a step may be smaller
        total = max(
            micro, slots * micro - (chance.randrange(micro) if chance.random() < 0.3 else 0)
        )
        samples = chance.randrange(total, total * 4 + 1)
        sizes = {
            "samples": samples,
            "global_batch": total,
            "micro_batch": micro,
            "epochs": chance.choice((1, 1, 2)),
        }
        if chance.random() < 0.15:
            sizes["drop_last"], samples = True, samples - samples % total
        if ranks > 1 and chance.random() < 0.1 and not local:
            sizes["balance"] = [chance.choice((1, 2, 3)) for _ in range(ranks)]
        return sizes, _of_loader(samples, total, micro, ranks) * sizes["epochs"]
    begin, windows = 0, []
    steps = chance.randrange(3, 7)
    # join(): a rank has inputs for some of the steps, one rank for all
    ends = [chance.randrange(1, steps + 1) for _ in range(ranks)]
    ends[chance.randrange(ranks)] = steps
    for step in range(steps):
        busy = [True] * ranks
        even = chance.randrange(1, 4)
        if door in STEPPERS and idle:
            busy = [chance.random() < 0.5 for _ in range(ranks)]
            busy[chance.randrange(ranks)] = True
        if door == "join":
            busy, even = [step < last for last in ends], 1
        window = []
        for rank in range(ranks):
            micros = []
            count = even if door in WRAPPERS else chance.randrange(1, 4)
            for _ in range(count * busy[rank]):
                size = chance.randrange(1, 5)
                micros.append(range(begin, begin + size))
                begin += size
            window.append(tuple(micros))
        windows.append(tuple(window))
    return {}, tuple(windows)


def _of_loader(samples: int, total: int, micro: int, ranks: int) -> Windows:
    """The cut that docs/guide/data.md describes."""
    slots = -(-total // micro)
    each, more = divmod(slots, ranks)
    windows = []
    for start in range(0, samples, total):
        stop = min(start + total, samples)
        cut = [
            range(start + slot * micro, min(start + slot * micro + micro, stop))
            for slot in range(slots)
        ]
        shares, begin = [], 0
        for rank in range(ranks):
            count = each + (rank < more)
            shares.append(tuple(part for part in cut[begin : begin + count] if part))
            begin += count
        windows.append(tuple(shares))
    return tuple(windows)


def _events(
    chance: Random,
    door: str,
    values: dict[str, Any],
    options: dict[str, Any],
    steps: int,
    samples: int,
) -> dict[str, Any]:
    """What happens on the way."""
    frozen: dict[int, tuple[int, bool]] = {}
    blocks, stepper = values["blocks"], door in STEPPERS
    server = options.get("update") == "server"
    if (
        blocks
        and steps > 2
        and door not in ("hook", "backend", "join")
        and not server
        and chance.random() < 0.3
    ):
        block = chance.randrange(len(blocks))
        first = chance.randrange(steps - 1)
        frozen[first] = (block, False)
        if chance.random() < 0.7:
            frozen[chance.randrange(first + 1, steps)] = (block, blocks[block] != "frozen")
    if frozen or "branches" in blocks:  # static_graph promises that no backward differs
        options.pop("static_graph", None)
    own = stepper and not options.keys() & {
        "reduce",
        "bucket_mb",
        "exact",
        "compress",
        "sync_every",
    }
    own = own and not server
    alone = options.get("sync_every") is not None or server
    resumes = stepper and not any(name in options for name in ("sync_every", "compress", "witness"))
    resumes = resumes and not server and "dropout" not in blocks
    reload = (
        chance.randrange(1, steps) if resumes and steps > 1 and chance.random() < 0.15 else None
    )
    shares = stepper and values["weighing"] in ("shares", "tensor")
    return {
        "frozen": frozen,
        "by_hand": not stepper or (not server and chance.random() < 0.3),
        "reload": reload,
        "average": stepper
        and reload is None
        and (not alone or chance.random() < 0.05)
        and chance.random() < 0.1,
        # torch has no kernel that scales complex gradients
        "scaled": stepper
        and "complex" not in blocks
        and (not alone or chance.random() < 0.05)
        and chance.random() < 0.1,
        "by_all": chance.random() < 0.5,
        "wrapped": own and chance.random() < 0.4,
        "poisoned": (chance.randrange(samples),) if stepper and chance.random() < 0.06 else (),
        "empty": chance.randrange(steps) if shares and chance.random() < 0.15 else None,
        "set_to_none": stepper or chance.random() < 0.7,
    }
