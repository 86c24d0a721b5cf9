"""What Lockstep adds to a small step: a bare loop, the same loop around the wrapper and around
torch's DDP, and the Stepper, on the same micro-batches, in turns.

    python benchmarks/overhead.py --workers 1
    python benchmarks/overhead.py --workers 2 --models digits,many --steps 100

What is measured, and how, is in steps.py and baselines.py.
The models are digits with its own micro-batches, one of 5,000 parameters of 64 and 8 elements, and a
CNN of 0.1 M. "local" communicates with nobody. "added" is what a way takes more than it: of a step,
of a micro-batch, and as a share, by 25th percentiles; what else the machine does comes on top of
both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from baselines import WINDOWS
from cases import cnn, images, loss, optimizer
from lockstep.tasks import digits
from lockstep.tools.timing.output_files import table
from steps import measure

VARIANTS = ("local", "ddp:25", "wrapper:native", "stepper:native")
SHARED = ("wrapper:shared", "stepper:shared", "stepper:sharded")
_MICRO_BATCHES, _SAMPLES = 2, 8  # of a rank; of a micro-batch


class Many(nn.Module):
    """[batch, 8] -> [batch, 8] through 2,500 small layers in 50 branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))) for _ in range(50)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).mean(0)


def task_of(model: Callable[[], nn.Module], workers: int) -> lockstep.Task:
    generator = torch.Generator().manual_seed(0)
    count = WINDOWS * workers * _MICRO_BATCHES * _SAMPLES
    samples = (
        (
            torch.randn(count, 8, generator=generator),
            torch.randint(8, (count,), generator=generator),
        )
        if model is Many
        else images(count, generator)
    )
    return lockstep.Task(
        name=model.__name__.lower(),
        model=model,
        train_data=TensorDataset(*samples),
        loss=loss,
        optimizer=optimizer,
        global_batch=workers * _MICRO_BATCHES * _SAMPLES,
        micro_batch=_SAMPLES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", default="digits,many,cnn")
    parser.add_argument("--variants")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    workers = options.workers
    sources: dict[str, Callable[[], lockstep.Task]] = {
        "digits": digits.task,
        "many": partial(task_of, Many, workers),
        "cnn": partial(task_of, cnn, workers),
    }
    variants = (options.variants or ",".join(VARIANTS)).split(",")
    if workers > 1 and not options.variants:
        variants = [*variants, *SHARED]
    for name in options.models.split(","):
        task = sources[name]()
        each = task.global_batch // task.micro_batch // workers
        found = measure(sources[name], workers=workers, variants=variants, steps=options.steps)
        bare = next(row.p25 for row in found.rows if row.variant == "local")
        lines = []
        for row in found.rows:
            added = row.p25 - bare
            lines.append(
                [
                    row.variant,
                    f"{1e6 * row.median:.0f} us",
                    f"{1e6 * row.p25:.0f} us",
                    f"{1e6 * added:.0f} us",
                    f"{1e6 * added / each:.0f} us",
                    f"{added / bare:+.1%}",
                ]
            )
        head = ["variant", "median", "p25", "added: a step", "a micro-batch", "share"]
        print(f"{name}, {workers} workers, {each} micro-batches a rank and step")
        print(table(head, lines), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
