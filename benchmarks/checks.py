"""What the checks cost: a step with them and without, in turns, in one run; and one replica check by itself.

    python benchmarks/checks.py --workers 2 --models mlp,transformer,cnn --steps 30

`full` is the default; `start` compares no replicas; `off` nothing; `untagged` is full without the comparison of collectives. A replica
check is made every 100 steps, so a hundredth of its time counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import lockstep
from against_ddp import CASES, loss
from lockstep.checks.replicas import ReplicaCheck

VARIANTS = ("off", "start", "full", "untagged")


def measure(name: str, steps: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of every step of every variant, the slowest rank's; and of one replica check."""
    with lockstep.init() as world:
        case = CASES[name]
        generator = torch.Generator().manual_seed(world.rank)
        steppers = {}
        for kind in VARIANTS:
            torch.manual_seed(0)
            model = case.model()
            checks = "full" if kind == "untagged" else kind
            steppers[kind] = lockstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), checks=checks)  # type: ignore[arg-type]
        seconds: dict[str, list[float]] = {kind: [] for kind in VARIANTS}
        tags = world.group.tags
        for step in range(steps + 3):
            batch = case.samples(case.batch, generator)
            for kind in VARIANTS if step % 2 else reversed(VARIANTS):
                world.group.all_reduce(torch.zeros(1)).wait()
                world.group.tags = None if kind == "untagged" else tags
                begin = time.perf_counter()
                stepper = steppers[kind]
                for micro in stepper.micro_batches([batch]):
                    stepper.backward(*loss(stepper.model(micro[0]), micro))
                stepper.step()
                if step >= 3:
                    seconds[kind].append(time.perf_counter() - begin)
                world.group.tags = tags
        slowest = torch.tensor([seconds[kind] for kind in VARIANTS], dtype=torch.float64)
        world.group.all_reduce(slowest, "max").wait()
        return dict(zip(VARIANTS, slowest.tolist(), strict=True)), _one_check(world, stepper)


def _one_check(world: lockstep.World, stepper: lockstep.Stepper) -> float:
    check = ReplicaCheck(world.group)
    times = []
    for _ in range(5):
        world.barrier()
        begin = time.perf_counter()
        check.compare(list(stepper.model.named_parameters()), "in a benchmark")
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="mlp,transformer,cnn")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    for name in options.models.split(","):
        seconds, check = lockstep.launch(measure, workers=options.workers, args=(name, options.steps))[0]
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        quarter = {kind: statistics.quantiles(values, n=4)[0] for kind, values in seconds.items()}
        print(f"{name}, {options.workers} workers, {options.steps} steps each")
        for kind in VARIANTS:
            against = f"{100 * (median[kind] / median['off'] - 1):+6.1f} % of off" if kind != "off" else ""
            print(f"  {kind:<9} median {1e3 * median[kind]:8.2f} ms   p25 {1e3 * quarter[kind]:8.2f} ms   {against}")
        print(f"  one replica check {1e3 * check:.2f} ms: {check / median['off']:.2f} % of the time at one in 100 steps")


if __name__ == "__main__":
    main()
