"""A busy host is told from a quiet one by what runs now and what ran in the last minute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.runtime.cores import busy

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("load", "running", "expected"),
    [
        (3 * CORES, 3 * CORES + 1, True),
        (0.1, 1, False),
        (3 * CORES, 1, False),
        (0.1, 3 * CORES, False),
    ],
)
def test_both_must_be_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, running: int, expected: bool
) -> None:
    file = tmp_path / "loadavg"
    file.write_text(f"{load:.2f} 1.00 1.00 {running}/500 1234\n")
    monkeypatch.setenv("LOCKSTEP_LOADAVG", str(file))
    sentence = busy()
    assert (sentence is not None) == expected
    if sentence is not None:
        assert sentence.startswith(f"load {load:.1f} on {CORES} core")
