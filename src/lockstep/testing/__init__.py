"""Helpers for tests of distributed code: run several ranks, and inject faults."""

from __future__ import annotations

from lockstep.testing.faults import (
    exit_at,
    fail_at,
    hang_at,
    hold_gil_at,
    kill_at,
    no_faults,
    slow_at,
    stop_at,
)
from lockstep.testing.ranks import run_ranks, warm_commands

__all__ = [
    "exit_at",
    "fail_at",
    "hang_at",
    "hold_gil_at",
    "kill_at",
    "no_faults",
    "run_ranks",
    "slow_at",
    "stop_at",
    "warm_commands",
]
