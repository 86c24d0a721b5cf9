"""Ranks of a script, supervised from the test's process."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.rank import Target
from lockstep.launcher.supervise import supervise

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run script.py of that text in `tmp_path`, supervised from this process, which has torch
    loaded already. Returns the exit code, stdout and stderr. No file of the run may be left.
    """

    def supervised(text: str, workers: int = 2, *args: str, **options: Any) -> tuple[int, str, str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(text))
        outcome = supervise(Target(script="script.py", args=args), workers, **options)
        assert not list(tmp_path.rglob("run-*"))
        return (outcome.exit_code, *capfd.readouterr())

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return supervised
