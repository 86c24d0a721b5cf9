"""What exact mode costs: a training step with and without it, in turns, on the same ranks and micro-batches.

    python benchmarks/exact.py --workers 2 --models small-mlp,transformer,cnn --micro-batches 1,4

`--micro-batches` are those of a rank. The models are those of against_ddp.py. Exact steps run with torch's deterministic algorithms and
the ordinary ones without, on one intra-op thread a rank both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep
from against_ddp import CASES
from lockstep.gradients.exact.determinism import Determinism
from lockstep.measure.turns import Way, take_turns

WAYS = {"ordinary": False, "exact": True}


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every sample is a whole micro-batch."""

    def __init__(self, name: str, count: int) -> None:
        self._case, self._count = CASES[name], count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._case.batch(torch.Generator().manual_seed(number))


def training(name: str, mine: int, reduce: str, exact: bool, world: lockstep.World) -> Way:
    torch.manual_seed(0)
    model = CASES[name].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stepper = lockstep.Stepper(model, optimizer, reduce=reduce, exact=exact, world=world)
    loader = lockstep.Loader(
        Batches(name, 8 * mine * world.size),
        global_batch=mine * world.size,
        micro_batch=1,
        shuffle=False,
        collate_fn=lambda items: items[0],
    )
    windows = [window for epoch in loader.epochs(1) for window in epoch]
    for window in windows:
        window.drain()
    turn = 0

    def step() -> None:
        nonlocal turn
        determinism = Determinism() if exact else None
        for x, y in stepper.micro_batches(windows[turn % len(windows)]):
            stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        stepper.step()
        turn += 1
        if determinism is not None:
            determinism.close()

    return step


def measure(name: str, mine: int, reduce: str, steps: int) -> dict[str, list[float]]:
    with lockstep.init() as world:
        ways = {way: training(name, mine, reduce, exact, world) for way, exact in WAYS.items()}
        torch.use_deterministic_algorithms(False)
        return take_turns(ways, steps, world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="small-mlp,transformer,cnn")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--reduce", default="shared_memory,native")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = []
    for reduce in options.reduce.split(","):
        for name in options.models.split(","):
            for mine in map(int, options.micro_batches.split(",")):
                seconds = lockstep.launch(measure, workers=options.workers, args=(name, mine, reduce, options.steps))[0]
                median = {way: statistics.median(values) for way, values in seconds.items()}
                quarter = {way: statistics.quantiles(values, n=4)[0] for way, values in seconds.items()}
                print(
                    f"{reduce:<14} {name:<14} {mine} micro-batches a rank: ordinary {1e3 * median['ordinary']:7.1f} ms   "
                    f"exact {1e3 * median['exact']:7.1f} ms   exact / ordinary {median['exact'] / median['ordinary']:5.3f}   "
                    f"p25 {quarter['exact'] / quarter['ordinary']:5.3f}"
                )
                report.append({"reduce": reduce, "model": name, "micro_batches": mine, "seconds": seconds})
    if options.json:
        options.json.write_text(json.dumps({"workers": options.workers, "torch": torch.__version__, "rows": report}, indent=1))


if __name__ == "__main__":
    main()
