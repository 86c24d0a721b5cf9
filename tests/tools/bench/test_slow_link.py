"""benchmarks/slow_link.py: one run of two hosts."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("slow_link")


@pytest.mark.timeout(300)
def test_two_hosts_train_and_what_left_them_is_counted(bench: Any, tmp_path: Path) -> None:
    if reason := bench.namespaces.why_not():
        pytest.skip(reason)
    small = "width=32 depth=1 length=32 train_bytes=3000 eval_bytes=1000 global_batch=4"
    out = tmp_path / "slow.json"
    words = ["--workers=2", "--rate=100mbit", "--steps=10", "--ddp-buckets=5", f"--json={out}"]
    words += ["--methods=native; central --nonsense", *(f"--set={pair}" for pair in small.split())]
    done = subprocess.Popen([sys.executable, str(BENCHMARKS / "slow_link.py"), *words])
    assert done.wait(timeout=250) == 0
    ddp, native, broken = json.loads(out.read_text())["rows"]
    assert native["counted"] == pytest.approx(ddp["sent"], rel=0.25)
    assert 1 < native["sent"] / native["counted"] < 1.3  # headers
    assert native["curve"][-1][1] == pytest.approx(ddp["curve"][-1][1], rel=1e-3)
    assert "is not an option of" in broken["problem"]
    namespaces = subprocess.check_output(["ip", "netns", "list"], text=True)
    assert f"lsl{done.pid}" not in namespaces
