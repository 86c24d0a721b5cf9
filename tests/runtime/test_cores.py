"""A busy host is told from a quiet one by what runs in every look."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from lockstep.runtime import cores
from lockstep.runtime.cores import busy, quota, running

CORES = os.cpu_count() or 1


def test_what_runs_in_every_look_keeps_a_core_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loadavg"
    monkeypatch.setenv("LOCKSTEP_LOADAVG", str(file))
    seen = [CORES + 2] * 11

    def look(seconds: float) -> None:
        file.write_text(f"0.00 1.00 1.00 {seen.pop()}/500 1234\n")

    monkeypatch.setattr(time, "sleep", look)
    look(0)
    assert str(busy()).startswith(f"{CORES + 1} other programs run on {CORES} core")
    seen[:] = [9, 9, 2, 9, 9, 9]
    look(0)
    assert running() == 1
    seen[:] = [9, 9, 2, 9, 9, 9]
    look(0)
    assert running(own=3) == 0
    monkeypatch.setenv("LOCKSTEP_LOADAVG", str(tmp_path / "nowhere"))
    seen[:] = [9] * 10
    assert (running(), busy()) == (0, None)


@pytest.mark.parametrize("version", [1, 2])
def test_the_time_of_a_control_group_and_of_those_around_it_is_counted_in_cores(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_process = tmp_path / "of-process"
    controllers = "cpu,cpuacct" if version == 1 else ""
    of_process.write_text(f"9:name=systemd:/other\n3:{controllers}:/job/1\n")
    inner = tmp_path / controllers / "job" / "1"
    inner.mkdir(parents=True)

    def limit(folder: Path, microseconds: int) -> None:
        if version == 1:
            (folder / "cpu.cfs_quota_us").write_text(f"{microseconds}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (folder / "cpu.max").write_text(
                f"{'max' if microseconds < 0 else microseconds} 100000\n"
            )

    assert quota(of_process, tmp_path) == math.inf
    limit(inner, -1)
    assert quota(of_process, tmp_path) == math.inf
    limit(inner, 250_000)
    assert quota(of_process, tmp_path) == 2.5
    limit(inner.parent, 150_000)
    assert quota(of_process, tmp_path) == 1.5
    assert quota(tmp_path / "nowhere", tmp_path) == math.inf
    monkeypatch.setattr(cores, "quota", lambda: 0.5)
    assert cores.cores() == 1
