"""A command that another launcher has started as a rank: whose it is, and what it says when it
fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import PeerFailed, UsageError
from lockstep.launcher import failures
from lockstep.launcher.foreign import rank_here, refuse_watching, said
from lockstep.runtime.environment import placement
from tests.refused import refused

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "ENVIRONMENT": "BATCH"}


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("workers", [None, "2", 2])
def test_one_of_several_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, workers: str | int | None
) -> None:
    _set(monkeypatch, RANK)
    assert rank_here(workers) == placement(RANK)


@pytest.mark.parametrize("workers", ["3", "1:2", 4])
def test_another_number_of_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch, workers: str | int
) -> None:
    _set(monkeypatch, RANK)
    with refused(
        "workers-differ-from-launcher", workers=workers, size_name="WORLD_SIZE", size=2, rank=1
    ):
        rank_here(workers)


def test_alone_it_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_here(None) is None
    _set(monkeypatch, {"RANK": "0", "WORLD_SIZE": "1"})
    assert rank_here("4") is None


def test_in_a_batch_scripts_shell_the_number_must_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, BATCH)
    with refused("batch-script-shell", expected=2):
        rank_here(None)
    assert rank_here("2") is None


def test_what_only_a_launcher_of_ours_can_do_is_refused() -> None:
    place = placement(RANK)
    assert place is not None
    refuse_watching(place, False)
    with refused("options-of-a-launcher", source="RANK and WORLD_SIZE", rank=1, size=2) as caught:
        refuse_watching(place, True)
    assert "--debug and --cold are for the launcher" in str(caught.value)


def test_what_a_rank_says() -> None:
    def of(error: BaseException, rank: int = 1) -> str:
        return said(failures.of_exception(error, rank))

    assert of(UsageError("x=1: give 2")) == "error (rank 1): x=1: give 2\n"
    assert of(UsageError("x=1: give 2"), rank=0) == "error: x=1: give 2\n"
    assert of(SystemExit(75)) == ""
    gone = of(PeerFailed("rank 0 has gone"))
    assert gone.startswith("rank 1 (pid ")
    assert gone.endswith("failed: PeerFailed: rank 0 has gone\n")
    assert gone.count("\n") == 1
    lines = of(ValueError("bad")).splitlines()
    assert lines[0] == "ValueError: bad"
    assert lines[-1].endswith("failed: ValueError: bad")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")  # as scripts for torchrun do: from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
total = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(total)
if os.environ["LOCAL_RANK"] == "1":
    raise ArithmeticError(f"{total.item():g} {' '.join(sys.argv[1:])}")
sys.exit(3)
"""


def test_a_script_for_torchrun_as_tasks_of_a_step(tmp_path: Path) -> None:
    """What srun would do: the same command with other numbers. tests/launcher/slurm has the real
    one.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    command = [sys.executable, "-m", "lockstep", "run", str(script), "--lr", "1"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 1], errors
    assert errors[0] == ""
    assert "lockstep" not in errors[1].replace(str(tmp_path), "")
    assert errors[1].splitlines()[-1].endswith("failed: ArithmeticError: 3 --lr 1")
