"""What the checks cost: a step with them and without, in turns, in one run; one replica check and a
step's notes by themselves.

    python benchmarks/checks.py --workers 2 --models mlp,transformer,cnn --steps 30

`full` is the default; `start` compares no replicas; `off` nothing; `untagged` is full without the
comparison of collectives; `noted` is full with a status page, as under a launcher; `sharded`
compares weights within steps, `sharded off` does not. A check of all replicas is made every 100
steps, so a hundredth of its time counts: none falls into the steps that are timed. What a step
notes on its page is too little to be told from noise: the notes of a step are counted, and one is
timed; and so is one look of the launcher at all pages.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import lockstep
from cases import CASES, loss
from lockstep.collectives.fingerprints import Uncompared
from lockstep.launcher.stalls import Watcher
from lockstep.runtime import status
from lockstep.step.wrapper_arguments import Checks

VARIANTS = ("off", "start", "full", "untagged", "noted", "sharded off", "sharded")


def measure(name: str, steps: int, folder: str) -> tuple[dict[str, list[float]], float, float]:
    """Seconds of every step of every variant, the slowest rank's; of one replica check; notes of
    a step.
    """
    with lockstep.init() as world:
        status.open_page(Path(folder), world.rank)
        page = status._page
        assert page is not None
        case = CASES[name]
        generator = torch.Generator().manual_seed(world.rank)
        steppers = {}
        for kind in VARIANTS:
            torch.manual_seed(0)
            model = case.model()
            checks: Checks = (
                "start" if kind == "start" else "off" if kind.endswith("off") else "full"
            )
            update = "sharded" if kind.startswith("sharded") else "replicated"
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            steppers[kind] = lockstep.Stepper(model, optimizer, checks=checks, update=update)
        seconds: dict[str, list[float]] = {kind: [] for kind in VARIANTS}
        fingerprints, notes = world.group.fingerprints, 0
        for step in range(steps + 3):
            batch = case.samples(case.batch, generator)
            for kind in VARIANTS if step % 2 else reversed(VARIANTS):
                world.group.all_reduce(torch.zeros(1)).wait()
                world.group.fingerprints = Uncompared() if kind == "untagged" else fingerprints
                status._page = page if kind == "noted" else None
                before = page.ticks
                begin = time.perf_counter()
                stepper = steppers[kind]
                for micro in stepper.micro_batches([batch]):
                    stepper.backward(*loss(stepper.model(micro[0]), micro))
                stepper.step()
                if step >= 3:
                    seconds[kind].append(time.perf_counter() - begin)
                    notes += page.ticks - before
                world.group.fingerprints = fingerprints
        slowest = torch.tensor([seconds[kind] for kind in VARIANTS], dtype=torch.float64)
        world.group.all_reduce(slowest, "max").wait()
        return (
            dict(zip(VARIANTS, slowest.tolist(), strict=True)),
            _one_check(world, steppers["full"]),
            notes / steps,
        )


def _one_note(folder: Path) -> float:
    """Seconds, the mean of phases and collectives."""
    status.open_page(folder, 0)
    begin = time.perf_counter()
    for number in range(10000):
        status.enter("forward")
        status.enter("backward")
        status.collective(
            number, "all_reduce sum f32[1000] for gradient bucket 0 (layer.weight and 3 more)"
        )
    seconds = (time.perf_counter() - begin) / 30000
    status._page = None
    return seconds


def _one_look(folder: Path, workers: int) -> float:
    """Seconds of the launcher's, at pages that have changed since the last."""
    pages = [status.Page(status.file_of(folder, rank)) for rank in range(workers)]
    watcher = Watcher(folder)
    total = 0.0
    for number in range(1000):
        for page in pages:
            page.fields.step = number
            page.fields.ticks += 1
        begin = time.perf_counter()
        watcher.look(dict.fromkeys(range(workers), 1))
        watcher.slow(dict.fromkeys(range(workers), 1))
        total += time.perf_counter() - begin
    return total / 1000


def _one_check(world: lockstep.World, stepper: lockstep.Stepper) -> float:
    times = []
    for _ in range(5):
        world.barrier()
        begin = time.perf_counter()
        stepper.check_replicas()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="mlp,transformer,cnn")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        note, look = _one_note(Path(scratch)), _one_look(Path(scratch), options.workers)
    print(
        f"a note takes {1e6 * note:.2f} us; a look of the launcher at {options.workers} pages"
        f" {1e6 * look:.0f} us, 20 times a second"
    )
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            seconds, check, notes = lockstep.launch(
                measure, workers=options.workers, args=(name, options.steps, scratch)
            )[0]
        median = {kind: statistics.median(values) for kind, values in seconds.items()}
        quarter = {kind: statistics.quantiles(values, n=4)[0] for kind, values in seconds.items()}
        print(f"{name}, {options.workers} workers, {options.steps} steps each")
        for kind in VARIANTS:
            base = "sharded off" if kind == "sharded" else "off"
            pairs = sorted(
                mine / its for mine, its in zip(seconds[kind], seconds[base], strict=True)
            )
            against = (
                ""
                if kind.endswith("off")
                else f"{100 * (statistics.median(pairs) - 1):+6.1f} % of {base}, step by step"
            )
            print(
                f"  {kind:<11} median {1e3 * median[kind]:8.2f} ms   p25 {1e3 * quarter[kind]:8.2f}"
                f" ms   {against}"
            )
        print(
            f"  one replica check {1e3 * check:.2f} ms: {check / median['off']:.2f} % of the time"
            " at one in 100 steps"
        )
        print(
            f"  {notes:.0f} notes a step, {1e6 * notes * note:.0f} us:"
            f" {100 * notes * note / median['off']:.3f} % of the time"
        )


if __name__ == "__main__":
    main()
