"""The `lockstep` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. `train` handles a scheduler's signals from here on, because the imports
    alone take seconds.
    """
    try:
        from lockstep.launcher import early

        early.open_closed_streams()
        if sys.argv[1:2] == ["train"]:
            early.leave_when_asked()
        early.start_server(sys.argv[1:])
        from lockstep.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(130)
