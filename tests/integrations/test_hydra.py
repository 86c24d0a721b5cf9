"""@hydra.main on two ranks, which a launcher starts or the script itself: a multirun with one
output directory for each job, whatever the ranks would have chosen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

SCRIPT = Path(__file__).with_name("hydra_script.py")
CONFIG = """
optimizer: {lr: 0.1}
hydra:
  job: {chdir: true}
  run: {dir: "run/of-${oc.env:RANK,all}"}
  sweep: {dir: "jobs/of-${oc.env:RANK,all}"}
"""
CALLBACK = """
  callbacks:
    lockstep: {_target_: lockstep.integrations.hydra.OneOutputDirectory}
"""


def run(folder: Path, launcher: list[str], *overrides: str, config: str = CONFIG) -> None:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "config.yaml").write_text(config)
    shutil.copy(SCRIPT, folder / "script.py")
    done = subprocess.run(
        [sys.executable, *launcher, "script.py", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def digests(job: Path) -> list[str]:
    """Of a job's two ranks; their run directory was one."""
    assert json.loads((job / "run" / "settings.json").read_text())["workers"] == 2
    return [(job / f"rank-{rank}").read_text() for rank in (0, 1)]


def test_ranks_of_a_launcher_and_ranks_of_the_script_train_the_same_jobs(tmp_path: Path) -> None:
    """More than 5 s: three commands, and Hydra composes each job anew on each rank."""
    sweep = ["-m", "optimizer.lr=0.1,0.2"]
    run(tmp_path, ["-W", "error"], *sweep)
    run(tmp_path, ["-m", "lockstep", "run", "-n", "2"], *sweep, config=CONFIG + CALLBACK)
    assert {each.name for each in (tmp_path / "jobs").iterdir()} == {"of-all", "of-0"}
    for number, lr in enumerate((0.1, 0.2)):
        job = tmp_path / "jobs" / "of-0" / str(number)
        assert OmegaConf.load(job / ".hydra" / "config.yaml").optimizer.lr == lr
        assert len(list(job.glob("*.log"))) == 1
        ours, theirs = digests(job), digests(tmp_path / "jobs" / "of-all" / str(number))
        assert ours == theirs == [ours[0]] * 2


def test_a_single_run_has_one_directory_too(tmp_path: Path) -> None:
    run(tmp_path, ["-m", "lockstep", "run", "-n", "2"], config=CONFIG + CALLBACK)
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["of-0"]
    first, second = digests(tmp_path / "run" / "of-0")
    assert first == second
