"""benchmarks/fuzz.py: a few of its seeds, and whether it sees what differs."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fuzz")


def test_ten_seeds_train_what_one_process_trains(fuzz: ModuleType) -> None:
    assert fuzz.report(range(10))["different"] == 0


@pytest.mark.rest
def test_a_hundred_seeds_train_what_one_process_trains(fuzz: ModuleType) -> None:
    assert fuzz.report(range(10, 110))["different"] == 0


def test_a_difference_is_named_by_its_step_and_tensor(fuzz: ModuleType) -> None:
    case = next(case for case in map(fuzz.drawn, range(100)) if not case.blocks)
    ours, theirs = fuzz.oracle(case), fuzz.oracle(case)
    assert fuzz.difference(ours, theirs, 0.0) is None
    with torch.no_grad():
        ours.steps[1]["model"]["last.bias"][2] += 1e-3
    assert fuzz.difference(ours, theirs, 1e-5).startswith("step 1, model last.bias: [")
