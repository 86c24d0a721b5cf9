"""One rank slower than the others: a step with --balance auto beside every split of its
micro-batches that could be the best.

    python benchmarks/balance.py --workers 4 --slow 3 --micro-batches 16

Each forward sleeps, on the last rank `--slow` times as long: ranks then differ as devices do,
however few cores there are. Ways take turns of some steps each, in one process; auto has had its
steps to find its shares before it is measured, and the moves it made are told below the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

MICRO_BATCH = 4


class Slow(nn.Module):
    """A small network whose forward takes so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.net(x)
        return out


class Way:
    """One way to share out: its loader, and the seconds of its steps."""

    def __init__(self, balance: str | None, data: TensorDataset, micro_batches: int) -> None:
        self.loader = lockstep.Loader(
            data, global_batch=micro_batches * MICRO_BATCH, micro_batch=MICRO_BATCH, balance=balance
        )
        self._windows = self._walk()
        self.moves: list[tuple[int, str]] = []
        self.seconds: list[float] = []

    def _walk(self) -> Iterator[Any]:
        for epoch in self.loader.epochs(10**9):
            yield from epoch

    def step(self, stepper: lockstep.Stepper, model: nn.Module, world: lockstep.World) -> None:
        window = next(self._windows)
        if window.moved is not None:
            self.moves.append((window.step + 1, str(window.moved)))
        world.barrier()
        begin = time.perf_counter()
        for x, y in stepper.micro_batches(window):
            stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        stepper.step()
        self.seconds.append(time.perf_counter() - begin)


def candidates(workers: int, micro_batches: int) -> list[str]:
    """Even shares among the others, for every share of the last rank from none to an even one."""
    found = []
    for last in range(micro_batches // workers + 1):
        each, more = divmod(micro_batches - last, workers - 1)
        found.append(
            ",".join(map(str, [each + (rank < more) for rank in range(workers - 1)] + [last]))
        )
    return found


def measure(
    seconds: float, slow: float, micro_batches: int, turns: int, learning: int
) -> dict[str, Any]:
    """On one rank."""
    with lockstep.init() as world:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = Slow(seconds * (slow if world.rank == world.size - 1 else 1))
        data = TensorDataset(
            torch.randn(8 * micro_batches * MICRO_BATCH, 64),
            torch.randint(0, 10, (8 * micro_batches * MICRO_BATCH,)),
        )
        steppers: dict[str, tuple[lockstep.Stepper, nn.Module]] = {}
        ways: dict[str, Way] = {}
        for name in ["auto", *candidates(world.size, micro_batches)]:
            mine = Slow(model.seconds)
            steppers[name] = (
                lockstep.Stepper(
                    mine, torch.optim.SGD(mine.parameters(), lr=0.01), checks="off", world=world
                ),
                mine,
            )
            ways[name] = Way(name, data, micro_batches)
        for _ in range(learning):
            ways["auto"].step(*steppers["auto"], world)
        ways["auto"].seconds.clear()
        for turn in range(turns + 1):
            for name, way in ways.items():
                for _ in range(5):
                    way.step(*steppers[name], world)
                if turn == 0:
                    way.seconds.clear()  # warm-up
        return {
            "steps": {name: way.seconds for name, way in ways.items()},
            "moves": ways["auto"].moves,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0, help="times as long as the others")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.02, help="of sleep in a forward")
    parser.add_argument("--turns", type=int, default=6, help="of 5 steps each")
    parser.add_argument(
        "--learning", type=int, default=40, help="steps of auto before it is measured"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    args = (options.seconds, options.slow, options.micro_batches, options.turns, options.learning)
    ranks = lockstep.launch(measure, options.workers, args=args)
    found = ranks[0]
    slowest = {
        name: [max(each) for each in zip(*(rank["steps"][name] for rank in ranks), strict=True)]
        for name in found["steps"]
    }
    medians = {name: median(seconds) for name, seconds in slowest.items()}
    even = list(medians)[-1]
    best = min((name for name in medians if name != "auto"), key=medians.__getitem__)
    print(
        f"{options.workers} ranks, the last {options.slow:g} times slower; {options.micro_batches}"
        f" micro-batches of {1e3 * options.seconds:g} ms"
    )
    print("| micro-batches by rank | ms a step, median | x best split |")
    print("|---|---|---|")
    for name, seconds in medians.items():
        said = "even: " * (name == even) + name.replace(",", ", ") + " (best)" * (name == best)
        print(f"| {said} | {1e3 * seconds:.1f} | {seconds / medians[best]:.2f} |")
    print("moves of auto:")
    for step, line in found["moves"]:
        print(f"  step {step}: {line}")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"medians": medians, "best": best, "moves": found["moves"]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
