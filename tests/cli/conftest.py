"""Command lines in the test's own folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.command import Command, Ended, exit_code


@pytest.fixture
def lockstep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Runs a command line in this process and in `tmp_path`; its ranks are processes as ever."""
    monkeypatch.chdir(tmp_path)

    def run(line: str | Sequence[str]) -> Ended:
        capfd.readouterr()
        code = exit_code(line)
        return Ended(code, *capfd.readouterr())

    return run
