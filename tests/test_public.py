"""The public names, pinned: adding one is a decision, losing one is an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lockstep

NAMES = [
    "Checkpoints",
    "DistributedDataParallel",
    "DistributedSampler",
    "Loader",
    "Replicas",
    "ShardedOptimizer",
    "Stepper",
    "Task",
    "World",
    "backend",
    "benchmark_scaling",
    "collectives",
    "communication_ratio",
    "errors",
    "evaluate",
    "init",
    "launch",
    "predict",
    "scale_lr",
    "seed",
    "shared_memory_hook",
    "stream",
    "testing",
    "train",
]


def test_the_public_names_are_these() -> None:
    assert sorted(lockstep.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(lockstep))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves_and_says_what_it_is(name: str) -> None:
    assert getattr(lockstep, name).__doc__


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Steppr'; it has Checkpoints, "):
        lockstep.Steppr  # type: ignore[attr-defined]  # noqa: B018


def test_import_and_help_do_not_import_torch() -> None:
    code = "import sys, lockstep, lockstep.cli, lockstep.settings, lockstep.launcher.supervise; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
