"""`lockstep audit` from the outside: a table, and the exit code that says whether something is
wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from tests.cli.command import command as given
from tests.refused import refused

TASK = """
import numpy as np
import torch
from torch.utils.data import Dataset
from tests.training import toy

class Own(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index): return torch.from_numpy(np.random.default_rng().normal(size=3))

def task(own: bool = False):
    return toy.task(name=None, train_data=Own()) if own else toy.task(name=None)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audited_task.py"
    path.write_text(TASK)
    return path


def test_a_good_task(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given("audit", str(file), workers=2, json=file.with_suffix(".json"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "audited_task: 44 samples, 2 epochs, 2 workers"
    assert [line.split() for line in lines[2:5]] == [["rank", "samples"], ["0", "32"], ["1", "12"]]
    assert "ok     coverage      each of 44 samples once in epoch 1" in lines
    report = json.loads(file.with_suffix(".json").read_text())
    assert (report["task"], report["samples_by_rank"], report["wrong"]) == (
        "audited_task",
        [32, 12],
        False,
    )


def test_what_is_wrong_is_the_exit_code(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        given("audit", str(file), workers=2, set=["own=true"])
    assert left.value.code == 1
    assert "WRONG  augmentation  sample 0 differs" in capsys.readouterr().out


def test_mistakes_are_sentences(file: Path) -> None:
    with refused("unknown-task", task="digit"):
        given("audit", "digit")
    with refused("not-a-whole-number", name="workers", value=0):
        given("audit", str(file), workers=0)
    with pytest.raises(UsageError, match=r"--json .*none/x.json cannot be written"):
        given("audit", str(file), json=file.parent / "none" / "x.json")
