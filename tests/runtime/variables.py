"""Environments, written as a shell would: variables("RANK=1 WORLD_SIZE=2")."""

from __future__ import annotations


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


SRUN = variables(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=6 SLURM_LOCALID=2 SLURM_NODEID=1"
    " SLURM_STEP_TASKS_PER_NODE=3(x2) SLURM_STEP_NODELIST=n[1-2]"
)
"""Of a task that srun has started."""
