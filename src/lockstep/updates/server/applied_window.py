"""A window that the server has applied: what rank 0 records of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """One window, of which any rank may have computed any part."""

    step: int
    """Its number, counted from 0 over all epochs."""
    epoch: int
    loss: float
    weight: float
    samples_by_rank: tuple[int, ...]
    age: float
    """Updates that came between the pull and the application of its gradients, on average."""
    lr: float
    at: float
    """When (perf_counter)."""
    reason: str
    """Why the optimizer did not step; "" where it did."""
