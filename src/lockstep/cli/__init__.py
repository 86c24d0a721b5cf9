"""The `lockstep` command."""

from __future__ import annotations

from lockstep.cli.app import main

__all__ = ["main"]
