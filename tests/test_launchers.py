"""The same script under every launcher that can be had here: torchrun, mpiexec, our own, and
none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import pathlib, torch, lockstep
with lockstep.init() as world:
    total = lockstep.collectives.all_reduce(torch.tensor(1.0 + world.rank))
    said = f"{world.rank} {world.size} {world.local_rank} {world.local_size} {total.item()}"
    pathlib.Path(__file__).with_name(f"rank-{world.rank}").write_text(said)  # not printed: launchers may mix what ranks print
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
# The MPICH wheel's, beside the interpreter. It is of the test extra, so that this runs everywhere.
MPIEXEC = [
    shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec",
    "-n",
    "2",
    sys.executable,
]
LAUNCHERS = {
    "torchrun": (TORCHRUN, 2),
    "mpiexec": (MPIEXEC, 2),
    "lockstep run": ([sys.executable, "-m", "lockstep", "run", "--workers", "2"], 2),
    "python": ([sys.executable], 1),
}


@pytest.mark.parametrize(
    "launcher",
    [
        "lockstep run",
        "python",
        pytest.param("torchrun", marks=pytest.mark.rest),
        pytest.param("mpiexec", marks=pytest.mark.rest),
    ],
)
def test_one_script_under_every_launcher(launcher: str, tmp_path: Path) -> None:
    command, size = LAUNCHERS[launcher]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    total = float(sum(range(1, size + 1)))
    said = [path.read_text() for path in sorted(tmp_path.glob("rank-*"))]
    assert said == [f"{rank} {size} {rank} {size} {total}" for rank in range(size)]
