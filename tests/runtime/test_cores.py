"""A busy host is told from a quiet one by what runs now and what ran in the last minute."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from lockstep.runtime.cores import busy

CORES = os.cpu_count() or 1


def test_both_must_be_high(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loadavg"
    monkeypatch.setenv("LOCKSTEP_LOADAVG", str(file))
    low, high = (0.1, 1), (3 * CORES, 3 * CORES + 1)
    for (load, _), (_, running) in product((low, high), repeat=2):
        file.write_text(f"{load:.2f} 1.00 1.00 {running}/500 1234\n")
        assert (busy() is not None) == (load > 1 and running > 1)
    assert str(busy()).startswith(f"load {load:.1f} on {CORES} core")
