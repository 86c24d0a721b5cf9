"""`lockstep doctor` from outside, and what it makes of findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.doctor import report
from lockstep.doctor.finding import judged
from lockstep.doctor.one_host import Examined

ROOT = Path(__file__).parents[2]


def lockstep(*args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(ROOT)) if part)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-m", "lockstep", *args], env=environment, capture_output=True, text=True, check=False)


def test_this_host(tmp_path: Path) -> None:
    done = lockstep("doctor", "--json", str(tmp_path / "found.json"))
    assert done.stderr == ""
    found = json.loads((tmp_path / "found.json").read_text())
    levels = {finding["name"]: finding["level"] for finding in found["findings"]}
    assert list(levels) == [
        *("Python", "torch", "system", "backends", "GPUs", "cores", "memory", "/dev/shm", "limits", "clock"),
        *("own name", "interfaces", "loopback", "sums", "links"),
    ]
    assert levels["sums"] == "ok"
    assert {(link["source"], link["target"]) for link in found["links"]} == {("rank 0", "rank 1"), ("rank 1", "rank 0")}
    assert done.returncode == (0 if found["fit"] else 1)
    assert (done.stdout.splitlines()[-1] == "fit to train") == found["fit"]


def test_the_verdict_counts_what_is_to_fix_and_not_what_is_warned_of() -> None:
    fine, warned, broken = judged("a", "1"), judged("b", "2", warn="b is slow: hurry"), judged("c", "3", fix="c is gone: find it")
    assert report.verdict(Examined([fine, warned], [])) == "warning: b: b is slow: hurry\nfit to train"
    assert report.verdict(Examined([fine, broken, warned], [])) == (
        "warning: b: b is slow: hurry\nnot fit to train: 1 thing to fix\n1. c: c is gone: find it"
    )
    assert report.text(Examined([fine, broken], [])).splitlines()[:2] == ["ok    a           1", "fix   c           3"]
    assert [Examined(found, []).fit for found in ([fine, warned], [fine, broken])] == [True, False]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", "0"], "error: --workers 0: give at least 1"),
        (["--port", "1"], "error: --port 1 is for several hosts: name them, or leave --port out"),
        (["a", "b", "--workers", "2"], "error: --workers 2 is for one host: with HOSTS each starts one process, or leave --workers out"),
        (["--json", "/nowhere/x"], "error: --json /nowhere/x cannot be written"),
    ],
)
def test_mistakes_are_sentences_with_code_2(args: list[str], message: str) -> None:
    done = lockstep("doctor", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
