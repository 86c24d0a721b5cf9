"""benchmarks/silent_bugs.py: some of its bugs again, and the page that it has written."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import __file__ as tests

ROOT = Path(tests).parents[1]
PAGE = ROOT / "docs" / "guide" / "silent-bugs.md"
sys.path.insert(0, str(ROOT / "benchmarks"))  # also of the ranks that are started here

import silent_bugs  # noqa: E402


def row(name: str) -> str:
    (found,) = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} (")
    ]
    return found


def test_the_page_has_a_row_for_each() -> None:
    for name, bug in silent_bugs.BUGS.items():
        assert f"| {name} ({bug.source}) | {bug.happened} | {bug.here} | " in row(name)


def test_the_verdict_is_that_of_the_page() -> None:
    for name in ("deepspeed-1801, planted", "transformers-34204"):
        verdict = silent_bugs.judge(silent_bugs.BUGS[name])
        when = "" if verdict.step is None else f" in step {verdict.step}"
        assert f" | {verdict.how}{when} | " in row(name)
