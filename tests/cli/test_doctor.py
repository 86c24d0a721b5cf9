"""`lockstep doctor` from outside, and what it makes of findings."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.tools.doctor.examine import Examined
from lockstep.tools.finding import judged
from tests.cli.command import Command


def test_this_host(tmp_path: Path, lockstep: Command) -> None:
    ended = lockstep("doctor --json found.json")
    assert ended.err == ""
    report = json.loads((tmp_path / "found.json").read_text())
    levels = {finding["name"]: finding["level"] for finding in report["findings"]}
    names = "Python, torch, system, backends, GPUs, cores, binding, memory, /dev/shm, limits"
    names += ", own name, interfaces, loopback, sums, links"
    assert ", ".join(levels) == names
    assert levels["sums"] == "ok"
    links = {(link["source"], link["target"]) for link in report["links"]}
    assert links == {("rank 0", "rank 1"), ("rank 1", "rank 0")}
    assert ended.code == (0 if report["fit"] else 1)
    assert (ended.out.splitlines()[-1] == "fit to train") == report["fit"]


def test_the_verdict_counts_what_is_to_fix_and_not_what_is_warned_of() -> None:
    fine = judged("a", "1")
    warned = judged("b", "2", warn="b is slow: hurry")
    broken = judged("c", "3", fix="c is gone: find it")
    warning = "warning: b: b is slow: hurry\n"
    assert Examined([fine, warned], []).verdict() == f"{warning}fit to train"
    unfit = "not fit to train: 1 thing to fix\n1. c: c is gone: find it"
    assert Examined([fine, broken, warned], []).verdict() == warning + unfit
    assert [Examined(found, []).fit for found in ([fine, warned], [fine, broken])] == [True, False]
