"""Lightning's Trainer and Fabric with Lockstep's strategies, as with their own DDP; and with a
Loader, as in one process. What the two ranks do, and refuse, is lightning_script.py's.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import LockstepWarning
from lockstep.runtime import extras
from tests.refused import refused

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("lightning_script.py")
SAMPLES, GLOBAL_BATCH, SAVED, RATE = 83, 8, 7, 0.05


def one_process(accumulate: int, *, weighing: bool) -> tuple[list[torch.Tensor], list[list[int]]]:
    """The weights after two epochs of the script's training, and the samples of each step."""
    x = torch.randn(SAMPLES, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1), torch.arange(SAMPLES))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    loader = lockstep.Loader(data, global_batch=GLOBAL_BATCH, seed=3, rank=0, size=1)
    seen = []
    for epoch in loader.epochs(2):
        weight = 0.0
        for place, window in enumerate(epoch):
            for x, y, which in window:
                seen.append(which.tolist())
                counted = y > 0 if weighing else y >= 0
                F.cross_entropy(model(x), y, reduction="none")[counted].sum().backward()
                weight += int(counted.sum())
            if (place + 1) % accumulate == 0 or place + 1 == len(epoch):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= weight
                optimizer.step()
                optimizer.zero_grad()
                weight = 0.0
    return list(model.parameters()), seen


def close(found: Any, expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_two_ranks_train_as_one_process_and_resume_as_one(tmp_path: Path) -> None:
    """More than 5 s: two ranks import Lightning, which takes several times what torch takes."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--workers", "2", str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("rank-*.json"))) == 2
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    weights, seen = one_process(1, weighing=False)
    together = [one + other for one, other in zip(first["seen"], second["seen"], strict=True)]
    tails = [number for number, each in enumerate(seen) if len(each) < GLOBAL_BATCH]
    for number, (found, expected) in enumerate(zip(together, seen, strict=True)):
        # of the short last step rank 1 has nothing, and walks what rank 0 has, with weight 0
        assert found == (expected * 2 if number in tails else expected)
    assert tails
    close(first["weights"], weights)
    close(second["resumed"], weights)
    assert second["seen after"] == first["seen after"] == seen[SAVED:]
    close(first["accumulated"], one_process(4, weighing=True)[0])


def test_without_lightning_the_import_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "lockstep.integrations.lightning", raising=False)
    with refused("missing-extra", what="lockstep.integrations.lightning") as caught:
        importlib.import_module("lockstep.integrations.lightning")
    assert "[lightning]" in caught.value.values["install"]


def test_another_version_than_the_tested_ones_is_named() -> None:
    extras.warn_untested("pytest", "8.0", "99.0")
    with pytest.warns(
        LockstepWarning, match=r"pytest [\d.]+ is installed.* tested with 1.0 to 1.9"
    ):
        extras.warn_untested("pytest", "1.0", "1.9")
