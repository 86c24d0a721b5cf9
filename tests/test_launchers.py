"""The same script under the launchers of others that can be had here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

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


@pytest.mark.parametrize("command", [TORCHRUN, MPIEXEC], ids=["torchrun", "mpiexec"])
def test_one_script_under_every_launcher(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [path.read_text() for path in sorted(tmp_path.glob("rank-*"))]
    assert said == ["0 2 0 2 3.0", "1 2 1 2 3.0"]
