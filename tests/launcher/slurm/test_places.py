"""What real SLURM sets, and what we make of it: host lists, ranks of a step, and a batch
script's own shell.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.runtime.slurm_step import first_host
from tests.launcher.slurm.cluster import Cluster
from tests.test_launchers import SCRIPT

pytestmark = pytest.mark.rest

PLACE = """
import os, sys
from lockstep.errors import UsageError
from lockstep.runtime.environment import placement
try:
    print(sys.argv[1], placement(os.environ), flush=True)
except UsageError as error:
    print(sys.argv[1], error, flush=True)
"""


def test_the_first_host_of_a_list_as_scontrol_expands_it(slurm: Cluster) -> None:
    """tests/runtime/test_slurm_step.py draws lists."""
    lists = ["n[01-03,07]", "a1,b[2-3]", "rack[1-2]n[1-4]", "n[9-010]", "a,,b", "[1-2]"]
    for nodelist in (*lists, "ax[003,1-4]bx[07-9]", "n2"):
        shown = slurm.run("scontrol", "show", "hostnames", nodelist)
        assert first_host(nodelist) == shown.stdout.split()[0], (nodelist, shown.stderr)


def batch(slurm: Cluster, folder: Path, text: str, *options: str) -> str:
    """What a batch script printed."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    done = slurm.run(
        "sbatch", "--wait", f"--output={folder}/log", *options, str(script), cwd=folder
    )
    assert done.returncode == 0, (folder / "log").read_text()
    return (folder / "log").read_text()


def test_who_is_a_rank_in_a_job(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    command = f"{sys.executable} {tmp_path}/place.py"
    text = f"""
{command} shell
srun -n1 {command} one
srun {command} all
srun -n1 --ntasks-per-node=1 {command} meant
"""
    lines = batch(slurm, tmp_path, text, "--nodes=1", "--ntasks-per-node=2").splitlines()
    source = "source='SLURM_PROCID and SLURM_NTASKS')"
    assert sorted(line for line in lines if line.startswith("all ")) == [
        f"all Placement(rank={rank}, size=2, local_rank={rank}, local_size=2, node=0, {source}"
        for rank in range(2)
    ]
    shell, one, meant = (line for line in lines if line.startswith(("shell", "one", "meant")))
    assert "[batch-script-shell]" in shell
    assert one.startswith("one SLURM_NTASKS=1 but tasks-per-node=2: 1 of 2 processes started")
    assert "[fewer-tasks-than-asked]" in one
    assert meant == f"meant Placement(rank=0, size=1, local_rank=0, local_size=1, node=0, {source}"


def test_one_task_in_a_batch_script_is_a_plain_process(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    assert "shell None\n" in batch(
        slurm, tmp_path, f"{sys.executable} {tmp_path}/place.py shell", "--ntasks=1"
    )


def test_one_script_under_srun(slurm: Cluster, tmp_path: Path) -> None:
    """As under the other launchers (tests/test_launchers.py); every task has a shell of its own,
    so that they have no parent in common.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = slurm.run(
        "srun", "-n2", "bash", "-c", f"{sys.executable} {script}; exit $?", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in sorted(tmp_path.glob("rank-*"))] == [
        "0 2 0 2 3.0",
        "1 2 1 2 3.0",
    ]
