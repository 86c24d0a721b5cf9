"""The plain case stays plain: how many functions of how many files a step calls, and how often it
changes the room. A room is a folder of the package.

Traced is a step of an MLP with BatchNorm and dropout, AdamW and clip, with two micro-batches on each
rank. What a rank does while it polls for another rank is left out.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from tests.teams import on_team

_PACKAGE = str(Path(lockstep.__file__).parent) + "/"
_STEP = 5  # before it, buckets are laid out and the replicas are compared
_POLLING = ("waits", "StepClock.waits", "Waits.wait", "Waits._missing", "Waits._missing.<locals>.")
_GUESTS = (
    "checks/witness",
    "schedules/algorithms",
    "data/iterable",
    "gradients/compression",
    "gradients/exact",
    "launcher",
    "model_parallel",
    "step/witnessed_step",
    "updates/local_steps",
    "updates/repeated",
    "updates/server",
    "updates/shards",
)
_PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def files_of_a_step(world: lockstep.World) -> list[str]:
    """The file of each call, in their order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    )
    data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    # what "auto" finds the quickest on an idle host; a busy one may find otherwise
    reduce = "shared_memory" if world.size > 1 else "auto"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    stepper = lockstep.Stepper(model, optimizer, clip=1.0, reduce=reduce)
    loader = lockstep.Loader(data, global_batch=32 * world.size, micro_batch=16, seed=0)
    files: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(_PACKAGE)
            and not code.co_qualname.startswith(_POLLING)
        ):
            files.append(code.co_filename.removeprefix(_PACKAGE))

    windows = iter(next(iter(loader.epochs(1))))
    for step in range(_STEP + 1):
        if step == _STEP:
            sys.setprofile(profile)
        for x, y in stepper.micro_batches(next(windows)):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            stepper.backward(loss, weight=len(y))
        stepper.step()
    sys.setprofile(None)
    return files


@pytest.mark.parametrize(("workers", "most"), [(1, 220), (2, 300)])
def test_a_plain_step_calls_few_functions_of_few_files_and_no_guest(
    workers: int, most: int
) -> None:
    for files in on_team(files_of_a_step, workers):
        rooms = [file.split("/")[0] for file in files]
        changes = sum(before != after for before, after in itertools.pairwise(rooms))
        assert len(files) <= most
        assert len(set(files)) <= 28
        assert changes <= 80
        assert not [file for file in files if file.startswith(_GUESTS)]


def test_the_page_lists_the_files_of_a_plain_step_in_the_order_of_the_step() -> None:
    text = _PAGE.read_text(encoding="utf-8")
    section = text.split("## A plain step, file by file")[1].split("\n## ")[0]
    listed = re.findall(r"^ *\d+\. `([a-z_/0-9]+\.py)`", section, re.MULTILINE)
    files = on_team(files_of_a_step, 2)[0]
    assert listed == list(dict.fromkeys(files))
