"""What tests of distributed code need, Lockstep's own and yours."""

from __future__ import annotations

from lockstep.testing.ranks import run_ranks

__all__ = ["run_ranks"]
