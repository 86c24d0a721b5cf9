"""`lockstep train` as one of several ranks that torchrun started; srun: tests/launcher/slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.training.as_rank import train_as_rank
from lockstep.training.run_directory import RunDirectory
from lockstep.training.train import train
from lockstep.world.world import World
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--"]
TASK = """
import sys
from tests.training import toy

def task():
    sys.stdout.write("making the task\\n")  # in one piece: ranks say it at the same time
    return toy.task(name="toy")
"""


@pytest.mark.rest
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    done = subprocess.run(
        [*TORCHRUN, "lockstep", "train", "mine.py", "--exact"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()  # one name, made by rank 0 and agreed
    result = json.loads((run / "result.json").read_text())
    assert result["workers"] == 2
    (last,) = [line for line in done.stdout.splitlines() if line != "making the task"]
    assert last.startswith("toy: ")
    assert last.endswith(f"weights sha256 {result['sha256']}")
    assert result["sha256"] == toy.alone(_exact)
    assert (run / "rank-1.log").exists()


def _exact(world: World) -> str:
    return train(toy.task(name="toy"), exact=True, world=world).sha256


def _settings(**more: object) -> Settings:
    return Settings(task="digits", workers=2, **more)  # type: ignore[arg-type]


def _differently(world: World, folder: Path) -> str:
    with refused("ranks-started-differently") as steps:
        train_as_rank(_settings(steps=1 + world.rank), folder / "run")
    with refused("ranks-started-differently") as elsewhere:
        train_as_rank(_settings(), folder / f"run-{world.rank}")
    return "\n".join(caught.value.values["difference"] for caught in (steps, elsewhere))


def test_ranks_with_other_settings_are_refused(tmp_path: Path) -> None:
    expected = (
        "--steps differs: rank 0 has 1, rank 1 has 2\n--run differs: rank 0 has"
        f" {tmp_path}/run-0, rank 1 has {tmp_path}/run-1"
    )
    assert on_team(_differently, 2, args=(tmp_path,)) == [expected, expected]
    assert list(tmp_path.iterdir()) == []


def _refused(world: World, folder: Path) -> list[str]:
    words = []
    for resume in (False, True):
        with pytest.raises((UsageError, SystemExit)) as caught:
            train_as_rank(_settings(), folder / ("none" if resume else "used"), resume=resume)
        words.append(str(caught.value))
    return words


def test_a_run_directory_in_use_or_without_a_checkpoint_ends_all_with_one_code(
    tmp_path: Path,
) -> None:
    with RunDirectory.claim(tmp_path / "used", "x"):
        (used, first), second = on_team(_refused, 2, args=(tmp_path,))
    assert f"{tmp_path}/used is in use by process {os.getpid()} on " in used
    assert used.endswith(" [run-directory-in-use]")
    assert (first, second) == ("77", ["2", "77"])
    assert not (tmp_path / "none").exists()
