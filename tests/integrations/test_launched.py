"""Libraries see in the ranks of `lockstep run` that the ranks have been started, and join them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_LIGHTNING = """
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
assert TorchElasticEnvironment.detect()
rank, size = fabric.global_rank, fabric.world_size
total = fabric.all_reduce(torch.tensor(5.0 ** rank), reduce_op="sum")
"""
_ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
total = accelerator.reduce(torch.tensor(5.0 ** rank), reduction="sum")
"""
_TRANSFORMERS = """
import torch.distributed as dist
from transformers import TrainingArguments

arguments = TrainingArguments("out", use_cpu=True)
rank, size = arguments.process_index, arguments.world_size
total = torch.tensor(5.0 ** rank)
dist.all_reduce(total)
"""


@pytest.mark.parametrize(
    "script",
    [_LIGHTNING, _ACCELERATE, _TRANSFORMERS],
    ids=["lightning", "accelerate", "transformers"],
)
def test_a_library_joins_the_ranks(tmp_path: Path, script: str) -> None:
    """More than 5 s: two ranks import the library."""
    write = "sys.stdout.write(f'{rank} {size} {total.item()}\\n')"
    (tmp_path / "script.py").write_text(f"import sys, torch\n{script}\n{write}\n")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--workers", "2", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines())
    assert {"0 2 6.0", "1 2 6.0"} <= {*written}, done.stdout
