"""Accelerate with Lockstep's wrapper as with its own DDP; and with a Loader, as in one process.
What the ranks do, and refuse, is accelerate_script.py's.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from tests.integrations.scripts import joined, run
from tests.refused import refused

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("accelerate_script.py")
SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS, SAVED = 83, 12, 3, 2, 9


def one_process(*, weighing: bool) -> tuple[list[torch.Tensor], list[list[int]], list[float]]:
    """The weights after the script's training, the samples of each step, and the last rate."""
    x = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1), torch.arange(SAMPLES))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    sizes = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH}
    loader = lockstep.Loader(data, **sizes, seed=3, rank=0, size=1)
    seen = []
    for epoch in loader.epochs(EPOCHS):
        for window in epoch:
            losses = []
            for x, y, _ in window:
                counted = y > 0 if weighing else y >= 0
                losses.append(F.cross_entropy(model(x), y, reduction="none")[counted])
            torch.cat(losses).mean().backward()
            seen.append([int(each) for _, _, which in window for each in which])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return list(model.parameters()), seen, scheduler.get_last_lr()


def close(found: Any, expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-5)


def test_two_ranks_train_as_one_process_and_three_resume_as_one(tmp_path: Path) -> None:
    weights, seen, rate = one_process(weighing=False)
    two = run(SCRIPT, 2, tmp_path)
    assert joined(two, "whole") == seen
    assert len(seen[6]) % (2 * MICRO_BATCH) != 0  # a short step
    for rank in two:
        close(rank["whole"]["weights"], weights)
        close(rank["weighing"]["weights"], one_process(weighing=True)[0])
        assert rank["whole"]["rate"] == pytest.approx(rate)
    three = run(SCRIPT, 3, tmp_path)
    assert joined(three, "resumed") == seen[SAVED:]
    for rank in three:
        close(rank["resumed"]["weights"], weights)


def test_without_accelerate_the_import_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "lockstep.integrations.accelerate", raising=False)
    with refused("missing-extra", what="lockstep.integrations.accelerate") as caught:
        importlib.import_module("lockstep.integrations.accelerate")
    assert "[accelerate]" in caught.value.values["install"]
