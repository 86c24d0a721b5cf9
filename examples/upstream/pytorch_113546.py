"""torchrun ends with its own traceback, and the rank's is somewhere above.

https://github.com/pytorch/pytorch/issues/113546

Rank 1 of 2 raises a ValueError. torchrun's last lines name the rank, and in place of the error the
address of a page about tracebacks.

The line: `lockstep run --workers 2 script.py` for `torchrun --nproc-per-node 2 script.py`. The
rank's traceback comes last, without frames of the launcher, and then the rank's number.

    python examples/upstream/pytorch_113546.py
"""

import os
import re
import subprocess
import sys


def train() -> None:
    """The user's script, on each rank."""
    if os.environ["RANK"] == "1":
        raise ValueError("bad sample in shard 17")


def end_of(*launcher: str) -> str:
    """What the last 12 lines hold of the rank's error, and the last one that has words."""
    command = [sys.executable, "-m", *launcher, __file__]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = [line.strip() for line in done.stdout.splitlines()[-12:]]
    error = any(line.startswith("ValueError") for line in lines)
    place = any(re.search(r"line \d+, in train", line) for line in lines)
    last = [line for line in lines if re.search(r"\w", line)][-1]
    return f"error: {error}, its place: {place}; {re.sub(r' [(]pid.*?[)]', '', last)}"


def before() -> str:
    options = ("--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1")
    return end_of("torch.distributed.run", *options)


def after() -> str:
    return end_of("lockstep", "run", "--workers", "2")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        print("before:", before())
        print("after:", after())
