"""The `lockstep` command."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point. What a training leaves with where a scheduler ends it holds from here on: the imports alone take seconds."""
    if sys.argv[1:2] == ["train"]:
        from lockstep.launcher.early import leave_when_asked

        leave_when_asked()
    from lockstep.cli import app

    app.main()
