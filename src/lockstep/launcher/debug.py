"""--debug: what the libraries below have to say, and a line for every collective, in the ranks' log files."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.launcher.log_place import log_of

COLLECTIVES = "LOCKSTEP_DEBUG_FILE"
"""Environment variable: the file to which this rank adds a line for every collective (collectives/record.py)."""


def switch_on(rank: int, logs: Path) -> None:
    """Set this rank's variables, before torch is imported. A variable that the user has set stays as it is.

    Not TORCH_DISTRIBUTED_DEBUG: DETAIL, its useful value, crashes torch's DDP over gloo on CPUs (torch 2.13 and 2.14).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO")
    if "NCCL_DEBUG" not in os.environ:
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ.setdefault("NCCL_DEBUG_FILE", str(logs / f"rank-{rank}.nccl.log"))
    os.environ.setdefault(COLLECTIVES, str(log_of(logs, rank)))
