"""Scripts of hosts (Accelerate, transformers) under `lockstep run`, and what their ranks found."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

Found = list[dict[str, Any]]


def run(script: Path, workers: int, folder: Path) -> Found:
    """What each rank has left in `folder`, as WORKERS-RANK.json."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--workers", str(workers), str(script), folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{workers}-{rank}.json").read_text()) for rank in range(workers)]


def joined(ranks: Found, of: str) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    steps = zip(*(rank[of]["seen"] for rank in ranks), strict=True)
    return [list(chain.from_iterable(each)) for each in steps]
