"""What saving a checkpoint costs a training: steps while one is being written beside steps while
none is, in turns, on the same ranks; with --peer also while torch's distributed checkpoint writes.

    python benchmarks/saving.py --workers 2 --mb 1000 --rounds 4 --peer

The state is a model's and AdamW's (parameters and two moments): `--mb` MB together. A round is some
steps without a save, a save and the steps until it is on disk, and as many without again. Times are
the slowest rank's. `median` is that of the rounds, of the median step during the save to the median
without; p25 and mean are of all steps. `costs`, in steps: the snapshot, and what steps took longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.tools.timing.in_turns import largest, settle

WIDTH = 1024
PLAIN_STEPS = 4


def model_of(megabytes: int) -> nn.Module:
    """Linear layers whose parameters and two moments take about `megabytes` MB."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    return nn.Sequential(
        *(module for _ in range(layers) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    )


@dataclass
class Round:
    """Seconds."""

    without: list[float]
    during: list[float]
    snapshot: float
    writing: float


class Ours:
    def __init__(self, directory: str, stepper: lockstep.Stepper) -> None:
        self._checkpoints = lockstep.Checkpoints(directory, stepper, every=10**9, keep=1)
        self.save, self.wait = self._checkpoints.save, self._checkpoints.wait
        self.close = self._checkpoints.close

    def saving(self) -> bool:
        return self._checkpoints.saving


class Peer:
    """torch.distributed.checkpoint.async_save: a thread of every rank writes, over a group of its
    own.
    """

    def __init__(self, directory: str, stepper: lockstep.Stepper) -> None:
        self._folder, self._stepper = f"{directory}/peer", stepper
        self._group: Any = dist.new_group(backend="gloo")
        self._under_way: Any = None

    def save(self) -> None:
        state = {
            "model": self._stepper.model.state_dict(),
            "optimizer": self._stepper.optimizer.state_dict(),
        }
        self._under_way = dcp.async_save(
            state, checkpoint_id=self._folder, process_group=self._group
        )

    def wait(self) -> None:
        self._under_way.result()

    def saving(self) -> bool:
        return not self._under_way.done()

    def close(self) -> None: ...


def measure(
    megabytes: int, batch: int, rounds: int, peer: bool, directory: str, device: str | None
) -> dict[str, list[Round]]:
    with lockstep.init(device=device) as world:
        torch.manual_seed(0)
        model = model_of(megabytes).to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        stepper = lockstep.Stepper(model, optimizer, world=world)
        x = torch.randn(batch, WIDTH, device=world.device)

        def step() -> float:
            begin = perf_counter()
            for mine in stepper.micro_batches([x]):
                stepper.backward(F.mse_loss(model(mine), mine, reduction="sum"), batch)
            stepper.step()
            settle(world)
            return largest(perf_counter() - begin, world)

        for _ in range(5):
            step()
        variants: dict[str, Any] = {"lockstep": Ours(directory, stepper)}
        if peer:
            variants["torch"] = Peer(directory, stepper)
        for variant in variants.values():
            variant.save()  # the first makes the memory of the snapshot
            variant.wait()
        found: dict[str, list[Round]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, variant in variants.items():
                found[name].append(one_round(world, variant, step))
        for variant in variants.values():
            variant.close()
        return found


def one_round(world: lockstep.World, variant: Any, step: Callable[[], float]) -> Round:
    without = [step() for _ in range(PLAIN_STEPS)]
    begin = perf_counter()
    variant.save()
    snapshot, during = largest(perf_counter() - begin, world), []
    while True:
        now = step()
        if world.agree(not variant.saving()):
            break  # some of this step passed without a save
        during.append(now)
    variant.wait()
    writing = largest(perf_counter() - begin, world)
    without += [step() for _ in range(PLAIN_STEPS)]
    return Round(without, during, snapshot, writing)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peer", action="store_true", help="torch's checkpoints, too")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--directory", type=Path, help="where it is saved; default: a temporary folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        found = lockstep.launch(
            measure,
            workers=options.workers,
            args=(
                options.mb,
                options.batch,
                options.rounds,
                options.peer,
                scratch,
                options.device,
            ),
        )[0]
    if options.json:
        every = {name: [asdict(one) for one in rounds] for name, rounds in found.items()}
        options.json.write_text(json.dumps({"megabytes": options.mb, "rounds": every}, indent=1))
    print(f"{options.mb} MB of state, {options.workers} workers, {options.batch} samples a rank")
    print("          a step  during a save  median   p25  mean  steps  snapshot  all of it  costs")
    for name, rounds in found.items():
        print(row(name, rounds))


def row(name: str, rounds: list[Round]) -> str:
    without = [each for one in rounds for each in one.without]
    during = [each for one in rounds for each in one.during]
    ratios = [
        statistics.median(one.during) / statistics.median(one.without)
        for one in rounds
        if one.during
    ]
    if len(during) < 2:
        raise SystemExit(
            "no step began and ended during a save: give a larger --mb or a smaller --batch"
        )
    step, snapshot = statistics.median(without), [one.snapshot for one in rounds]
    longer = sum(during) - len(during) * statistics.mean(without)
    quarter = statistics.quantiles(during, n=4)[0] / statistics.quantiles(without, n=4)[0]
    return (
        f"{name:<9} {1e3 * step:4.0f} ms {1e3 * statistics.median(during):11.0f} ms "
        f" {statistics.median(ratios):6.3f} {quarter:.3f}"
        f" {statistics.mean(during) / statistics.mean(without):.3f} {len(during):4}"
        f" {1e3 * statistics.median(snapshot):7.0f} ms"
        f" {statistics.median(one.writing for one in rounds):7.1f} s"
        f"  {(longer + sum(snapshot)) / step / len(rounds):.2f} steps"
    )


if __name__ == "__main__":
    main()
