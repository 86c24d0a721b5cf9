"""A collective that times out does not say which rank was missing.

https://github.com/pytorch/pytorch/issues/134803

Rank 1 of 2 reads a shard and never comes to the all-reduce. Rank 0 fails at its timeout, and
torchrun calls rank 0 the root cause.

The line: `lockstep run --workers 2 script.py` for `torchrun --nproc-per-node 2 script.py`. The
launcher names the rank that is not there and the line of the script where it is.

    python examples/upstream/pytorch_134803.py
"""

import os
import re
import subprocess
import sys
import time
from datetime import timedelta


def read_shard() -> None:
    time.sleep(600)


def train() -> None:
    """The user's script, on each rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    patience = timedelta(seconds=6)  # torch's default is 30 minutes
    group = dist.new_group(timeout=patience)
    if dist.get_rank() == 1:
        read_shard()
    dist.all_reduce(torch.ones(1), group=group)


def said(*launcher: str) -> str:
    command = [sys.executable, "-m", *launcher, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def before() -> str:
    options = ("--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1")
    printed = said("torch.distributed.run", *options)
    blamed = re.findall(r"Root Cause.*?rank +: (\d)", printed, re.DOTALL)
    return f"root cause: rank {', '.join(blamed)}; read_shard named: {'read_shard' in printed}"


def after() -> str:
    printed = said("lockstep", "run", "--workers", "2", "--stall-after", "1")
    blamed = re.findall(r"Rank (\d) is not there", printed) or [printed]
    return f"not there: rank {', '.join(blamed)}; read_shard named: {'read_shard' in printed}"


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        print("before:", before())
        print("after:", after())
