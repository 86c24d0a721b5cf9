"""One training step against torch's DistributedDataParallel, Accelerate's and Fabric's, in turns,
in one run, on the same ranks.

    python benchmarks/against_ddp.py --workers 2 --models small-mlp,small-mlp128,cnn4,transformer
    python benchmarks/against_ddp.py --workers 4 --models small-mlp,cnn4 --json four.json \\
        --plot four.png
    python benchmarks/against_ddp.py --device cuda --workers 1

What is measured, and how, is `lockstep bench train`'s (src/lockstep/tools/bench/training_step.py);
here are the models, as tasks on made-up data, other data on each rank. DDP has
gradient_as_bucket_view and buckets of 5, 25 and 100 MB; every way the same fused optimizer.
Lockstep's ways: its DistributedDataParallel and its Stepper, over native collectives and through
shared memory, with a sharded update, and with that and one copy of the weights. "local" does not communicate: on one rank it is the bare
loop. `--compile` compiles every model; `--memory` measures peak memory too, of each way in ranks of
its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
import rivals
from lockstep.errors import UsageError
from lockstep.tools.bench import training_step
from lockstep.tools.bench.baselines import WINDOWS
from lockstep.tools.bench.training_step import BASELINES, measure
from lockstep.tools.timing.output_files import check_plot, check_writable, write_json

VARIANTS = (
    *BASELINES,
    *rivals.WRAPPERS,
    "wrapper:native",
    "wrapper:shared",
    "stepper:native",
    "stepper:shared",
    "stepper:sharded",
    "stepper:weights",
)
Samples = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.attend(self.norms[0](x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.feed(self.norms[1](x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 384)
        self.blocks = nn.Sequential(*[Block(384, 6) for _ in range(6)])
        self.head = nn.Linear(384, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(x)))
        return logits


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 3072),
        nn.ReLU(),
        nn.Linear(3072, 3072),
        nn.ReLU(),
        nn.Linear(3072, 3072),
        nn.ReLU(),
        nn.Linear(3072, 1024),
    )


def small_mlp() -> nn.Module:
    """24 MiB of gradients."""
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 16),
        nn.ReLU(),
        nn.Linear(16, 1024),
    )


def convolutions(*widths: int) -> list[nn.Module]:
    """The first at full size, each of the others at half of the one before, until 4 x 4."""
    layers: list[nn.Module] = []
    for place, (inside, outside) in enumerate(zip((3, *widths[:-1]), widths, strict=True)):
        stride = 2 if 0 < place < 4 else 1
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1, stride=stride, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
        ]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def cnn() -> nn.Module:
    return nn.Sequential(*convolutions(16, 32, 64, 128), nn.Linear(128, 10))


def cnn4() -> nn.Module:
    """4 MiB of gradients."""
    return nn.Sequential(
        *convolutions(32, 64, 128, 256, 256), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    samples: Samples
    batch: int
    """Samples of a rank's step."""


def rows(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 1024, generator=g), torch.randint(0, 1024, (count,), generator=g)


def texts(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (count, 64), generator=g), torch.randint(
        0, 256, (count, 64), generator=g
    )


def images(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(0, 10, (count,), generator=g)


CASES = {
    "mlp": Case(mlp, rows, 32),
    "mlp128": Case(mlp, rows, 128),
    "small-mlp": Case(small_mlp, rows, 32),
    "small-mlp128": Case(small_mlp, rows, 128),
    "transformer": Case(Transformer, texts, 4),
    "cnn": Case(cnn, images, 32),
    "cnn4": Case(cnn4, images, 32),
}


class Compilable(nn.Module):
    """torch.compile leaves a bare nn.Sequential alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Of classes [batch, classes], or of bytes [batch, length, 256]."""
    return (
        F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"),
        batch[1].numel(),
    )


def task_of(name: str, workers: int, compiled: bool) -> lockstep.Task:
    """The case as a task in which every rank has one micro-batch a step."""
    case = CASES[name]
    return lockstep.Task(
        name=name,
        model=lambda: Compilable(case.model()),
        train_data=TensorDataset(
            *case.samples(WINDOWS * workers * case.batch, torch.Generator().manual_seed(0))
        ),
        loss=loss,
        optimizer=optimizer,
        global_batch=workers * case.batch,
        micro_batch=case.batch,
        compile=compiled,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--models",
        default="small-mlp,small-mlp128,cnn4,transformer",
        help=f"some of {', '.join(CASES)}",
    )
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--models {','.join(unknown)}: choose some of {', '.join(CASES)}")
    try:
        wrong = compare(names, options)
    except UsageError as error:
        parser.error(str(error))
    sys.exit(1 if wrong else 0)


def compare(names: list[str], options: argparse.Namespace) -> bool:
    """Measure, print and write; whether some way trained something else."""
    check_writable(options.json, "--json")
    check_plot(options.plot)
    every = []
    variants = options.variants.split(",")
    left_out = rivals.left_out(variants, "fp32")
    for name in names:
        found = measure(
            partial(task_of, name, options.workers, options.compile),
            workers=options.workers,
            variants=[variant for variant in variants if variant not in left_out],
            steps=options.steps,
            device=options.device,
            memory=options.memory,
            others=rivals.WRAPPERS,
        )
        every.append(replace(found, left_out={**left_out, **found.left_out}))
        print(training_step.text(every[-1]), end="\n\n", flush=True)
    write_json(
        options.json,
        {"models": [found.as_json() for found in every], "versions": rivals.versions()},
    )
    if options.plot is not None:
        training_step.plot(every, options.plot)
    return any(found.wrong for found in every)


if __name__ == "__main__":
    main()
