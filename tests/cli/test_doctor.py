"""`lockstep doctor` from outside, and what it makes of findings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.tools.doctor.examine import Examined
from lockstep.tools.finding import judged


def lockstep(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *args], capture_output=True, text=True, check=False
    )


def test_this_host(tmp_path: Path) -> None:
    done = lockstep("doctor", "--json", str(tmp_path / "found.json"))
    assert done.stderr == ""
    found = json.loads((tmp_path / "found.json").read_text())
    levels = {finding["name"]: finding["level"] for finding in found["findings"]}
    assert list(levels) == [
        *(
            "Python",
            "torch",
            "system",
            "backends",
            "GPUs",
            "cores",
            "memory",
            "/dev/shm",
            "limits",
        ),
        *("own name", "interfaces", "loopback", "sums", "links"),
    ]
    assert levels["sums"] == "ok"
    assert {(link["source"], link["target"]) for link in found["links"]} == {
        ("rank 0", "rank 1"),
        ("rank 1", "rank 0"),
    }
    assert done.returncode == (0 if found["fit"] else 1)
    assert (done.stdout.splitlines()[-1] == "fit to train") == found["fit"]


def test_the_verdict_counts_what_is_to_fix_and_not_what_is_warned_of() -> None:
    fine = judged("a", "1")
    warned = judged("b", "2", warn="b is slow: hurry")
    broken = judged("c", "3", fix="c is gone: find it")
    assert Examined([fine, warned], []).verdict() == "warning: b: b is slow: hurry\nfit to train"
    assert (
        Examined([fine, broken, warned], []).verdict()
        == "warning: b: b is slow: hurry\nnot fit to train: 1 thing to fix\n1. c: c is gone:"
        " find it"
    )
    assert Examined([fine, broken], []).text().splitlines()[:2] == [
        "ok    a           1",
        "fix   c           3",
    ]
    assert [Examined(found, []).fit for found in ([fine, warned], [fine, broken])] == [True, False]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--workers", "0"],
            "error: --workers 0: give a whole number of at least 1. [wrong-value]",
        ),
        (
            ["--nodes", "2"],
            "error: --nodes 2 is set, but not --node-rank and --rdzv-endpoint. Set all of them,"
            " or none. [incomplete-settings]",
        ),
        (["--ray", "--nodes", "2"], "error: --ray and --nodes 2 exclude each other"),
        (["--json", "/nowhere/x"], "error: --json /nowhere/x cannot be written"),
    ],
)
def test_mistakes_are_sentences_with_code_2(args: list[str], message: str) -> None:
    done = lockstep("doctor", *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
