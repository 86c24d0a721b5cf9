"""One training step against torch's DistributedDataParallel, in turns, in one run, on the same ranks.

    python benchmarks/against_ddp.py --workers 2 --models mlp,transformer,cnn --steps 30

Every rank has its own data. Before each step all ranks meet; a step's time is the slowest rank's. The variants take turns, step by
step, so that the noise of a shared machine falls on all alike. DDP is given its best setting: gradient_as_bucket_view and the
bucket size that is fastest here, both with the same fused optimizer and one intra-op thread a core and rank. The results are
compared as well as timed. Lockstep's variants: native collectives, gradients in shared memory, and a sharded update besides. `--compile`
compiles every model; `--memory` measures in place of time the peak of each variant's resident memory, in ranks of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
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
        return logits.flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 1024)
    )


def small_mlp() -> nn.Module:
    """24 MiB of gradients."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 16), nn.ReLU(), nn.Linear(16, 1024)
    )


def cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, stride=2 if inside > 3 else 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def rows(count: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (torch.randn(count, 1024, generator=g), torch.randint(0, 1024, (count,), generator=g))


CASES = {
    "mlp": Case(mlp, rows(32)),
    "mlp128": Case(mlp, rows(128)),
    "small-mlp": Case(small_mlp, rows(32)),
    "small-mlp128": Case(small_mlp, rows(128)),
    "transformer": Case(Transformer, lambda g: (torch.randint(0, 256, (4, 64), generator=g), torch.randint(0, 256, (256,), generator=g))),
    "cnn": Case(cnn, lambda g: (torch.randn(32, 3, 32, 32, generator=g), torch.randint(0, 10, (32,), generator=g))),
}


class Compilable(nn.Module):
    """torch.compile leaves a bare nn.Sequential alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


# Of Lockstep's variants: reduce, and update.
_HOW = {"native": ("native", "replicated"), "shared": ("shared_memory", "replicated"), "sharded": ("shared_memory", "sharded")}


class Variant:
    """One way to take a step on the same model and data."""

    def __init__(self, kind: str, case: Case, compiled: bool) -> None:
        torch.manual_seed(0)
        self.model = Compilable(case.model())
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.stepper: lockstep.Stepper | None = None
        self.forward: nn.Module = self.model
        name, _, cap = kind.partition(":")
        if name == "ddp":
            self.forward = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=float(cap))
        elif name == "wrapper":
            self.forward = lockstep.DistributedDataParallel(self.model, reduce=_HOW[cap][0])
        elif name == "stepper":
            self.stepper = lockstep.Stepper(self.model, self.optimizer, reduce=_HOW[cap][0], update=_HOW[cap][1])

    def step(self, x: Tensor, y: Tensor) -> None:
        if self.stepper is not None:
            for a, b in self.stepper.micro_batches([(x, y)]):
                self.stepper.backward(F.cross_entropy(self.forward(a), b, reduction="sum"), weight=len(b))
            self.stepper.step()
            return
        self.optimizer.zero_grad()
        F.cross_entropy(self.forward(x), y).backward()
        self.optimizer.step()


def measure(name: str, kinds: list[str], steps: int, compiled: bool) -> dict[str, list[float]]:
    """Seconds of every step of every variant, on this rank; "local" does not communicate."""
    with lockstep.init() as world:
        case = CASES[name]
        generator = torch.Generator().manual_seed(world.rank)
        variants = {kind: Variant(kind, case, compiled) for kind in kinds}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for step in range(steps + 3):
            x, y = case.batch(generator)
            for kind in kinds if step % 2 else reversed(kinds):
                world.group.all_reduce(torch.zeros(1)).wait()
                begin = time.perf_counter()
                variants[kind].step(x, y)
                if step >= 3:
                    seconds[kind].append(time.perf_counter() - begin)
        _compare(variants)
        slowest = torch.tensor([seconds[kind] for kind in kinds], dtype=torch.float64)
        world.group.all_reduce(slowest, "max").wait()
        return dict(zip(kinds, slowest.tolist(), strict=True))


def peak(name: str, kind: str, steps: int) -> float:
    """MiB by which the resident memory of the fullest rank rose, at its peak, over what it was before the model."""
    with lockstep.init() as world:
        case = CASES[name]
        generator = torch.Generator().manual_seed(world.rank)
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True).step()  # what the first optimizer imports is not the model's
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        variant = Variant(kind, case, compiled=False)
        for _ in range(steps):
            variant.step(*case.batch(generator))
        rise = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
        world.group.all_reduce(rise, "max").wait()
        return rise.item()


def _compare(variants: dict[str, Variant]) -> None:
    """All variants that communicate took the same steps."""
    weights = {
        kind: torch.cat([parameter.detach().flatten() for parameter in variant.model.parameters()])
        for kind, variant in variants.items()
        if kind != "local"
    }
    first, *others = weights
    for other in others:
        gap = (weights[first] - weights[other]).norm() / weights[first].norm()
        assert gap < 1e-3, f"{first} and {other} trained differently: relative distance {gap:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="mlp,transformer,cnn")
    parser.add_argument(
        "--variants", default="local,ddp:5,ddp:25,ddp:100,wrapper:native,stepper:native,wrapper:shared,stepper:shared,stepper:sharded"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.variants.split(",")
    report: dict[str, dict[str, Any]] = {}
    for name in options.models.split(","):
        if options.memory:
            peaks = {kind: lockstep.launch(peak, workers=options.workers, args=(name, kind, options.steps))[0] for kind in kinds}
            print(f"{name}, {options.workers} workers: peak memory of a rank above that before the model")
            print("\n".join(f"  {kind:<16} {mib:8.1f} MiB" for kind, mib in peaks.items()))
            report[name] = {"peak_mib": peaks}
            continue
        seconds = lockstep.launch(measure, workers=options.workers, args=(name, kinds, options.steps, options.compile))[0]
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        quarter = {kind: statistics.quantiles(values, n=4)[0] for kind, values in seconds.items()}
        best = min((kind for kind in kinds if kind.startswith("ddp")), key=median.__getitem__)
        print(f"{name}, {options.workers} workers, {options.steps} steps each; best DDP: {best}")
        for kind in kinds:
            print(
                f"  {kind:<16} median {1e3 * median[kind]:8.1f} ms   p25 {1e3 * quarter[kind]:8.1f} ms   DDP / it {median[best] / median[kind]:5.2f}"
            )
        report[name] = {"seconds": seconds, "median": median, "p25": quarter, "best": best}
    if options.json:
        options.json.write_text(json.dumps({"workers": options.workers, "torch": torch.__version__, "models": report}, indent=1))


if __name__ == "__main__":
    main()
