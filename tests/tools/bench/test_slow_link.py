"""benchmarks/slow_link.py: what it reads and counts, and one run of two hosts."""

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


def notes(
    rank: int, *, step: float, sent: int, metrics: tuple[float, float]
) -> list[dict[str, Any]]:
    """Two epochs of four steps, with an evaluation of 100 s and 10^6 bytes after each."""
    found: list[dict[str, Any]] = [
        {"kind": "task", "metric": "bits", "mode": "min", "at": 0.0, "tx": 0}
    ]
    at, tx = 50.0, 7_000_000  # the start has taken and sent something too
    for number in range(1, 9):
        at, tx = at + step, tx + sent
        found.append({"kind": "step", "step": number, "at": at, "tx": tx, "sent": sent - 100})
        if number % 4 == 0:
            at, tx = at + 100, tx + 10**6
            found.append(
                {
                    "kind": "evaluate",
                    "step": number,
                    "at": at,
                    "tx": tx,
                    "metrics": {"bits": metrics[number // 4 - 1]},
                }
            )
    return found


def test_steps_are_told_apart_from_evaluations_and_the_start(bench: Any) -> None:
    found = bench.found_in(
        "x",
        [
            notes(0, step=0.5, sent=1000, metrics=(4.0, 3.0)),
            notes(1, step=9, sent=3000, metrics=(0, 0)),
        ],
        warm_up=2,
    )
    assert (found.steps, found.sent, found.counted) == (8, 3000, 2900)
    assert (found.median, found.mean) == pytest.approx((0.5, 0.5))
    assert found.curve == [(1.5, 4.0), (3.5, 3.0)]
    assert found.final == 3.0
    assert bench.time_to(4.1, "min", found) == 1.5
    assert bench.time_to(2.9, "min", found) is None
    assert bench.time_to(4.0, "max", found) == 1.5
    assert bench.target_of(found, "min") == pytest.approx(3.06)
    assert bench.target_of(found, "max") == pytest.approx(2.94)


def test_the_meeting_before_an_evaluation_belongs_to_the_last_step(bench: Any) -> None:
    lines = notes(0, step=1.0, sent=0, metrics=(5.0, 4.0))
    for line in lines:
        line["sent"] = 0
    first = next(place for place, line in enumerate(lines) if line["kind"] == "evaluate")
    before = lines[first - 1]
    lines.insert(
        first, {"kind": "met", "at": before["at"] + 2, "tx": before["tx"] + 7000, "sent": 6900}
    )
    found = bench.found_in("m", [lines], warm_up=0)
    assert found.sent == pytest.approx(7000 / 7)
    assert found.counted == pytest.approx(6900 / 7)
    assert found.curve[0] == (5.0, 5.0)


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
