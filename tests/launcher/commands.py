"""Commands in processes of their own, to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(
    *words: str, cwd: Path | None = None, read: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with such arguments; `read` is its stdin."""
    env = {**os.environ, **variables}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=cwd, env=env, input=read, capture_output=True, text=True, check=False
    )
