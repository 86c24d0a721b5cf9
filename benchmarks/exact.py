"""What exact mode costs: a training step with and without it, in turns, on the same ranks and
micro-batches.

    python benchmarks/exact.py --workers 2 --models small-mlp,cnn4,transformer --micro-batches 1,4

`--micro-batches` are those of a rank. The models are those of cases.py. Exact steps run with
torch's deterministic algorithms and the ordinary ones without, on one intra-op thread a rank both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

import lockstep
from cases import CASES, loss
from lockstep.runtime.determinism import Determinism
from lockstep.tools.timing.in_turns import Way, take_turns

WAYS = {"ordinary": False, "exact": True}
STEPS = 4  # that are walked again and again


def samples(name: str, count: int) -> Dataset[Any]:
    return TensorDataset(*CASES[name].samples(count, torch.Generator().manual_seed(0)))


def training(name: str, mine: int, reduce: str, exact: bool, world: lockstep.World) -> Way:
    torch.manual_seed(0)
    model = CASES[name].model().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stepper = lockstep.Stepper(model, optimizer, reduce=reduce, exact=exact, world=world)
    batch = CASES[name].batch
    total = mine * world.size * batch
    loader = lockstep.Loader(samples(name, STEPS * total), global_batch=total, micro_batch=batch)
    windows = [window for epoch in loader.epochs(1) for window in epoch]
    turn = 0

    def step() -> None:
        nonlocal turn
        determinism = Determinism(1) if exact else None
        for x, y in stepper.micro_batches(windows[turn % STEPS]):
            stepper.backward(*loss(model(x), (x, y)))
        stepper.step()
        turn += 1
        if determinism is not None:
            determinism.close()

    return step


def measure(
    name: str, mine: int, reduce: str, steps: int, device: str | None
) -> dict[str, list[float]]:
    with lockstep.init(device=device) as world:
        ways = {way: training(name, mine, reduce, exact, world) for way, exact in WAYS.items()}
        torch.use_deterministic_algorithms(False)
        return take_turns(ways, steps, world)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--models", default="small-mlp,cnn4,transformer", help=f"some of {', '.join(CASES)}"
    )
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--reduce", default="shared_memory,native")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = []
    for reduce in options.reduce.split(","):
        for name in options.models.split(","):
            for mine in map(int, options.micro_batches.split(",")):
                seconds = lockstep.launch(
                    measure,
                    workers=options.workers,
                    args=(name, mine, reduce, options.steps, options.device),
                )[0]
                median = {way: statistics.median(values) for way, values in seconds.items()}
                quarter = {
                    way: statistics.quantiles(values, n=4)[0] for way, values in seconds.items()
                }
                print(
                    f"{reduce:<14} {name:<12} {mine} a rank: ordinary"
                    f" {1e3 * median['ordinary']:7.1f} ms   exact {1e3 * median['exact']:7.1f} ms  "
                    f" exact / ordinary {median['exact'] / median['ordinary']:5.3f}   p25"
                    f" {quarter['exact'] / quarter['ordinary']:5.3f}",
                    flush=True,
                )
                report.append(
                    {"reduce": reduce, "model": name, "micro_batches": mine, "seconds": seconds}
                )
    if options.json:
        options.json.write_text(
            json.dumps(
                {"workers": options.workers, "torch": torch.__version__, "rows": report}, indent=1
            )
        )


if __name__ == "__main__":
    main()
