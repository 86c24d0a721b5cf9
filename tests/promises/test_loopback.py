"""On one host nothing of ours listens on the network: looked at from inside a run, while ranks
and loader workers live.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Rank 0 looks at the launcher's whole tree: nothing is polled, and everybody is in the middle of
# the work.
_LOOK = """
import json, os, psutil
from pathlib import Path

def look():
    launcher = psutil.Process(int(os.environ["LOCKSTEP_PARENT"]))
    every = [launcher, *launcher.children(recursive=True)]
    listening = [c.laddr.ip for process in every for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    Path("seen.json").write_text(json.dumps({"processes": len(every), "listening": listening}))
"""
_SCRIPT = """
import torch, lockstep
from lockstep import collectives
from seen import look

if __name__ == "__main__":
    with lockstep.init() as world:
        data = torch.utils.data.TensorDataset(torch.arange(16.0))
        loader = lockstep.Loader(data, global_batch=8, micro_batch=2, num_workers=1)
        part = world.subgroup([0, 1])
        for epoch in loader.epochs(1):
            for window in epoch:
                for batch in window:
                    collectives.all_reduce(torch.ones(3), algorithm="native")
                    collectives.all_reduce(torch.ones(3), algorithm="shared_memory")
                    collectives.all_reduce(torch.ones(3), algorithm="ring", group=part)
                world.barrier()
                if world.rank == 0:
                    look()
                world.barrier()
"""
_TASK = """
import os
from seen import look
from tests.training import toy

class Net(toy.Net):
    calls = 0

    def forward(self, x):
        Net.calls += 1
        if os.environ.get("RANK") == "0" and Net.calls == 4:
            look()
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net)
"""


def _run(folder: Path, *words: str) -> dict[str, object]:
    (folder / "seen.py").write_text(_LOOK)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, object] = json.loads((folder / "seen.json").read_text())
    return seen


def _closed(seen: dict[str, object]) -> None:
    assert isinstance(seen["listening"], list)
    assert isinstance(seen["processes"], int)
    assert seen["processes"] >= 5  # the launcher, two ranks, their loader workers
    assert {each.split(".")[0] for each in seen["listening"]} == {"127"}


def test_a_script_with_every_transport_and_loader_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    _closed(_run(tmp_path, "run", "-n", "2", "script.py"))


@pytest.mark.parametrize(
    "reduce", ["native", pytest.param("shared_memory", marks=pytest.mark.rest)]
)
def test_a_training_with_loader_workers(reduce: str, tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(_TASK)
    options = f"-n 2 --reduce {reduce} --loader-workers 1 --run run --epochs 1"
    _closed(_run(tmp_path, "train", "my_task.py", *options.split()))
