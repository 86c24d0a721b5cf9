"""The public names, pinned: adding one is a decision, losing one is an accident."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys

import pytest

import lockstep

NAMES = [
    "Checkpoints",
    "DistributedDataParallel",
    "DistributedSampler",
    "EarlyStopping",
    "Loader",
    "PreparedLoader",
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
    "evaluating",
    "init",
    "launch",
    "log",
    "predict",
    "prepare",
    "runs",
    "scale_lr",
    "seed",
    "shared_memory_hook",
    "stream",
    "testing",
    "timing",
    "total",
    "train",
    "weigh",
]


def test_the_public_names_are_these() -> None:
    assert sorted(lockstep.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(lockstep))
    assert not [name for name in NAMES if not getattr(lockstep, name).__doc__]
    with pytest.raises(AttributeError, match=r"no attribute 'Steppr'"):
        lockstep.Steppr  # type: ignore[attr-defined]  # noqa: B018


def test_the_public_names_of_collectives_are_these() -> None:
    algorithms = ["Link", "Network", "Proof", "Round", "Schedule", "Transfer", "algorithms_of"]
    algorithms += ["in_process", "prove", "schedule"]
    tensors = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce"]
    tensors += ["reduce_scatter", "scatter", "Group", "Work"]
    names = lockstep.collectives.__all__
    assert sorted(names) == sorted([*algorithms, *tensors, "Kind", "REDUCING"])
    assert not [name for name in algorithms if not getattr(lockstep.collectives, name).__doc__]


def test_import_and_help_do_not_import_torch() -> None:
    code = (
        "import sys, lockstep, lockstep.cli, lockstep.config.settings, lockstep.launcher.supervise;"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CALLABLE = {*NAMES} - {"backend", "collectives", "errors", "runs", "testing", "timing"}


def test_help_shows_every_parameter() -> None:
    """Real parameters in the signature, and where there are more than three, each with a line of
    the Args list.
    """
    for name in CALLABLE - {"World"}:  # made by init()
        parameters = inspect.signature(getattr(lockstep, name)).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        assert name not in ("Stepper", "train") or inspect.Parameter.VAR_KEYWORD not in kinds
        _, _, listed = (inspect.getdoc(getattr(lockstep, name)) or "").partition("Args:\n")
        documented: set[str] = set()
        for names in re.findall(r"^    ([a-z_, ]+): ", listed, re.MULTILINE):
            documented.update(names.split(", "))
        assert len(parameters) <= 3 or set(parameters) <= documented, name


def test_a_public_name_is_no_module_of_that_name() -> None:
    """Importing lockstep.NAME would put the module in its place."""
    assert not [name for name in CALLABLE if importlib.util.find_spec(f"lockstep.{name}")]
