"""`lockstep report` on runs of every state: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from typer.testing import CliRunner

from lockstep.cli.app import app
from tests.tools.report.runs import anatomy, make, metrics


def report(*words: str) -> str:
    done = CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_finished_run(tmp_path: Path) -> None:
    run, out = make(tmp_path / "run"), tmp_path / "report.json"
    action, verdict, page, timeline = report(str(run), "--json", str(out)).splitlines()
    assert "rank 3" in action
    assert "data phase takes 55 ms a step, others 4." in action
    assert verdict.startswith("4 ranks: ")
    assert (page, timeline) == (f"page: {run}/report.html", f"timeline: {run}/timeline.json")
    assert "rank 3 is slow" in (run / "report.html").read_text()
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]
    found = json.loads(out.read_text())
    assert found["verdict"]["do_first"]["sentence"] == action
    assert found["verdict"]["sentences"] == [action, verdict]
    assert [each["ranks"] for each in found["ranks"]] == [[0], [1], [2], [3]]
    assert found["ranks"][3]["data"] > 0.05
    start = {"workers": 4, "from": 0, "to": 40, "missing": [], "seconds": 0}
    assert found["starts"][0] | {"seconds": 0} == start
    assert found["state"] == "finished"


def test_a_run_under_way(tmp_path: Path) -> None:
    parts = anatomy(2, 8)
    for each in parts.values():
        del each[-1]
    run = make(tmp_path / "run", parts=parts, finished=False)
    with (run / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report(str(run))
    text = (run / "report.html").read_text()
    assert "run, under way" in text
    assert "<td>under way</td>" in text


def test_a_run_without_a_step(tmp_path: Path) -> None:
    none = make(tmp_path / "none", parts=anatomy(2, 0), records=metrics(0), finished=False)
    assert report(str(none)).startswith("No step was recorded")


def test_the_page_goes_where_it_is_asked_to_and_can_be_written_again(tmp_path: Path) -> None:
    """Also of a run without anatomy, which has its curves."""
    run, out = make(tmp_path / "run", parts={}), tmp_path / "elsewhere.html"
    first, page = report(str(run), "--out", str(out)).splitlines()
    assert first.startswith("This run has no record of its steps")
    assert page == f"page: {out}"
    assert "Throughput" in out.read_text()
    assert not (run / "report.html").exists()
    assert not (run / "timeline.json").exists()
    assert report(str(run)) == report(str(run))
