"""What stands on the page, for runs of all kinds; and that nothing of a run's files is ever
markup.
"""

from __future__ import annotations

import re
import shlex
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.report import command_of
from lockstep.runs import read
from lockstep.tools.report.page import as_json, page
from lockstep.tools.report.verdict import verdict
from tests.tools.report.runs import anatomy, make, metrics

EVIL = "<script>alert('1')</script> & \"quoted\" $\\alpha$"


class Reader(HTMLParser):
    """Tags, ids, texts by heading; every tag that is opened is closed."""

    VOID = ("meta", "link", "path", "use", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def written(run: Path) -> str:
    recorded = read(run)
    found = None if recorded.timeline is None else verdict(recorded.timeline, recorded.settings)
    return page(recorded, found, command_of(recorded.settings))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of an ordinary run."""
    return written(make(tmp_path_factory.mktemp("run")))


def test_all_sections(whole: str) -> None:
    found = Reader(whole)
    headings = {"What to do first", "Time by rank", "A step of each rank", "Who waited for whom"}
    assert headings | {"Loss", "accuracy", "Throughput", "Memory by rank"} <= {*found.headings}
    assert len(found.ids) == len(set(found.ids))
    assert len(whole) < 500_000

    # figures have their numbers beside them
    tags = found.tags
    assert tags.count("figure") == tags.count("svg") == 6
    assert tags.count("details") == 6 + 3  # numbers of figures, and sections
    assert tags.count("table") == tags.count("caption") == tags.count("thead")
    row = re.search(r'<th scope="row">rank 3</th>(.*?)</tr>', whole)
    assert row is not None
    assert re.findall("<td>(.*?)</td>", row[1])[:2] == ["55", "23"]  # ms a step in data and forward


def test_nothing_is_loaded_and_nothing_runs(whole: str) -> None:
    assert not {"script", "iframe", "object", "img", "base"} & set(Reader(whole).tags)
    assert not re.findall(r"(?:src|href|action)=\"(?!#|data:)", whole)
    assert not re.findall(r"url\((?!#)|@import|http-equiv=\"refresh", whole)
    assert "default-src 'none'" in whole


def evil_run(tmp_path: Path) -> Path:
    parts = anatomy(2, 5)
    for each in parts.values():
        each[0] |= {"host": EVIL, "device": EVIL, "method": EVIL}
        each[-2]["what"] = EVIL
    event = {"kind": "event", "event": EVIL, "line": EVIL, "step": EVIL}
    evaluation = {"kind": "evaluate", "step": 3, "epoch": 1, "metrics": {EVIL: 1.0}, "seconds": 1.0}
    task = tmp_path / "<script>alert(2)<" / "script>.py"
    asked: dict[str, Any] = {"task": str(task), "overrides": {EVIL: EVIL}, "checkpoints": EVIL}
    return make(
        tmp_path / "<b>run",
        records=metrics(5, more=[event, evaluation, {**event, "line": None}]),
        parts=parts,
        **asked,
    )


def test_what_files_say_is_never_markup(tmp_path: Path) -> None:
    text = written(evil_run(tmp_path))
    tags = set(Reader(text).tags)
    assert not {"script", "b"} & tags
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; &#34;quoted&#34;" in text
    assert EVIL not in text


@pytest.mark.parametrize(
    ("changes", "judged"),
    [
        ({"parts": {}, "records": []}, False),
        ({"parts": {}}, False),
        ({"records": [], "finished": False}, True),
        ({"parts": anatomy(1, 1), "records": metrics(1)}, True),
        ({"parts": anatomy(2, 0), "records": metrics(2)}, False),
        (
            {
                "parts": {0: anatomy(2, 5)[0]},
                "records": [{"kind": "step", "step": 1, "loss": "nan", "samples_per_s": "inf"}],
            },
            True,
        ),
    ],
)
def test_runs_of_which_something_is_missing(
    tmp_path: Path, changes: dict[str, Any], judged: bool
) -> None:
    found = Reader(written(make(tmp_path, **changes)))
    assert "The run" in found.headings
    assert ("A step of each rank" in found.headings) is judged
    assert ("What to do first" in found.headings) is judged


def test_many_ranks_and_steps_are_not_all_drawn(tmp_path: Path) -> None:
    text = written(make(tmp_path / "long", records=metrics(20_000, every=100), parts={}))
    assert "Each point is the median of 50 steps." in text
    assert len(text) < 500_000
    text = written(make(tmp_path / "wide", parts=anatomy(40, 4), records=[]))
    assert "Shown are the 32 that others waited for most; 8 are not." in text
    assert len(text) < 1_500_000


def test_the_run_is_described_once(tmp_path: Path) -> None:
    rows = metrics()
    rows[0] = {
        **rows[0],
        "at": "2026-11-24T12:45:34+00:00",
        "seed": 7,
        "machine": {"torch": "2.13", "processor": "a CPU", "GPU": ""},
        "versions": {"lockstep": "0.2", "python": "3.11"},
    }
    for number, row in enumerate(rows):
        if row["kind"] == "step":
            rows[number] = {**row, "lr": 0.1 / row["step"], "grad_norm": 2.0}
    asked: dict[str, Any] = {"exact": True, "compile": False, "log": ["csv", "wandb"]}
    run = make(tmp_path, records=rows, overrides={"width": "8 9"}, **asked)
    text = written(run)
    cells = Reader(text).cells
    described = {
        "processor": "a CPU",
        "versions": "lockstep 0.2, python 3.11, torch 2.13",
        "seed": "7",
        "learning rate at the end": "0.0025",
    }
    assert {name: cells[cells.index(name) + 1] for name in described} == described
    assert "started 2026-11-24 12:45:34 UTC" in text
    command = re.search("<code>(lockstep train .*?)</code>", text)
    assert command is not None
    assert shlex.split(unescape(command[1])) == [
        *("lockstep", "train", "digits", "--exact", "--epochs", "2", "--no-compile"),
        *("--log", "csv", "--log", "wandb", "--workers", "4", "--set", "width=8 9"),
    ]
    assert "Learning rate" in Reader(text).headings
    assert "Gradient norm" not in Reader(text).headings  # a flat line is no figure

    # a task made in Python has no command
    assert "lockstep train" not in written(make(tmp_path / "python", task="my task"))


def test_restarts_checkpoints_and_events(tmp_path: Path) -> None:
    parts = anatomy(4, 10)
    for each in parts.values():
        del each[-1]
    resumed = {"event": "resumed", "line": "resumed from step 8 of 40", "step": 8, "workers": 3}
    skipped = {"event": "step skipped", "step": 9, "reason": "the loss is nan"}
    more = [{"kind": "event", **event} for event in (resumed, skipped)]
    run = make(tmp_path, parts=parts, records=metrics(10, more=more))
    folder = run / "checkpoints" / "step-0000008"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(2**20))
    (folder / "manifest.json").write_text("{}")
    (run / "checkpoints" / "best.json").write_text('{"checkpoint": "step-0000008"}')
    text = written(run)
    cells = Reader(text).cells
    assert "cut off: ranks 0, 1, 2 and 3" in cells
    assert "resumed from step 8 of 40" in cells
    assert "the loss is nan" in cells
    assert cells[cells.index("1.00 MiB") - 2 :][:4] == ["step-0000008", "8", "1.00 MiB", "best"]


def test_a_run_on_gpus_is_judged_too(tmp_path: Path) -> None:
    """There it is not known what was hidden, nor when each piece of a step began."""
    parts = anatomy()
    for each in parts.values():
        for line in each:
            if line["kind"] == "steps":
                line["hidden"] = None
                line.pop("spans", None)
    run = make(tmp_path, parts=parts)
    recorded = read(run)
    assert recorded.timeline is not None
    found = verdict(recorded.timeline)
    assert found is not None
    assert found.do_first.rank == 3
    cells = Reader(page(recorded, found, "")).cells
    assert cells.count("unknown") == 4


def spiky_run(run: Path, **asked: Any) -> Path:
    """Step 30 has a loss far above those before, step 35 one that is nan."""
    rows = metrics()
    for number, row in enumerate(rows):
        if row.get("kind") == "step" and row["step"] in (30, 35):
            rows[number] = {**row, "loss": 9.0 if row["step"] == 30 else "nan"}
    make(run, records=rows, **asked)
    for step in (10, 20):
        folder = run / "checkpoints" / f"step-{step:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    return run


def test_spikes_are_marked_and_linked_to_their_checkpoint_and_command(tmp_path: Path) -> None:
    run = spiky_run(tmp_path / "a run")
    text = written(run)
    reader = Reader(text)
    assert text.count('var(--waits)"><title') + text.count('fill="var(--waits)"') >= 2
    rows = re.findall(
        r'<tr><th scope="row">(30|35)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>', text
    )
    assert [row[0] for row in rows] == ["30", "35"]
    assert "loss 9, median before 0.13" in rows[0][1]
    assert rows[0][2] == '<a href="#step-0000020">step-0000020</a>'
    command = unescape(rows[0][3].removeprefix("<code>").removesuffix("</code>"))
    assert shlex.split(command) == ["lockstep", "replay", str(run), "--step", "30"]
    assert "step-0000020" in reader.ids
    assert f"lockstep replay {shlex.quote(str(run))} --step 10" in unescape(text)
    recorded = read(run)
    plain = as_json(recorded, None)
    assert (plain["spikes"], plain["worst"]) == ([30, 35], 35)


def test_a_run_that_no_command_repeats_has_no_command_to_replay(tmp_path: Path) -> None:
    text = written(spiky_run(tmp_path, task="train.py (a script)"))
    assert "#step-0000020" in text
    assert "lockstep replay" not in text
