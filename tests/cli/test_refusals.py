"""What is refused: in one style, with the option as it was typed, with exit code 2, before torch
is imported, and leaving nothing behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import app
from lockstep.cli.refusals import as_typed
from lockstep.errors import TaskError, UsageError


def refused(
    line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr("sys.argv", ["lockstep", *line])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("line", "begins", "words"),
    [
        (["train"], "TASK is missing", ["lockstep train -h"]),
        (["train", "digits", "--epochs", "two"], "--epochs two: ", ["a whole number"]),
        (["train", "digits", "--timeout=soon"], "--timeout soon: ", ["a number"]),
        (["train", "digits", "--witness", "1%"], "--witness 1%", ["--exact"]),
        (["train", "digits", "--exact", "--witness", "2"], "--witness 2", ["at most 1"]),
        (
            ["train", "digits", "--on-corruption", "exclude"],
            "--on-corruption exclude",
            ["--ray", "[nothing-to-exclude]"],
        ),
        (["train", "digits", "--max-restarts", "-1"], "--max-restarts -1: ", ["at least 0"]),
        (["train", "digits", "--precision", "bf8"], "--precision bf8 ", ["fp32, bf16"]),
        (["train", "digits", "-n", "0"], "--workers 0: ", []),
        (
            ["train", "digits", "--exact", "--reduce", "central"],
            "--reduce central with --exact",
            [],
        ),
        (["train", "digits", "--staleness", "3"], "--staleness 3 ", ["Choose server as update"]),
        (["train", "digits", "--mesh=rows=2"], "--mesh rows=2: ", ["data"]),
        (
            ["train", "digits", "--exact", "--compress", "bf16"],
            "--compress bf16 with --exact: ",
            [],
        ),
        (["train", "digits", "--update", "servers"], "--update servers is ", ["server"]),
        (["train", "digits", "--epochs", "2", "--steps", "3"], "--epochs 2 and --steps 3 ", []),
        (["run", "--workers", "two", "script.py"], "--workers two: ", ["a whole number"]),
        (["show", "data", "--split", "halves"], "--split halves: ", ["interleaved, blocks"]),
        (["show", "nothing"], "no such command 'nothing'", ["lockstep show -h"]),
        (["train", "digits", "more"], "got unexpected extra argument", ["more"]),
    ],
)
def test_the_value_is_named_as_it_was_typed(
    line: list[str],
    begins: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused(line, monkeypatch, capsys)
    assert said.startswith(begins)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("command", "typed", "meant"),
    [
        ("train", "--worker", "--workers"),
        ("run", "--work", "--workers"),
        ("evaluate", "--devise", "--device"),
    ],
)
def test_what_begins_alike_is_suggested_first(
    command: str,
    typed: str,
    meant: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f"(did you mean {meant}" in refused([command, typed, "2", "digits"], monkeypatch, capsys)


def test_what_a_task_has_set_is_no_option() -> None:
    error = TaskError("wrong-value", name="epochs", value=0, expected="a whole number")
    assert as_typed(error, ["--epochs", "3"]) == str(error)
    other = UsageError("wrong-value", name="global_batch", value=0, expected="a number")
    assert as_typed(other, ["--epochs", "3"]) == str(other)


def test_an_option_that_stands_as_one_is_left_alone() -> None:
    named = {"nodes_name": "--nodes", "nodes": 2, "each_name": "LOCAL_WORLD_SIZE", "each": 1}
    error = UsageError("workers-differ-from-variables", workers=4, share=2, **named)
    assert as_typed(error, ["--nodes", "2", "--workers", "4"]) == str(error)


def test_a_number_is_shown_as_it_was_typed() -> None:
    error = UsageError("wrong-value", name="bucket_mb", value=0.0, expected="a number")
    assert as_typed(error, ["--bucket-mb=0", "--exact"]).startswith("--bucket-mb 0: ")


EARLY = """
import contextlib, io, json, os, sys
from lockstep.cli.app import main
said = {}
for line in json.loads(sys.stdin.read()):
    sys.argv, before, out = ["lockstep", *line], sorted(os.listdir(".")), io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as left:
            code = left.code
    heavy = [name for name in ("torch", "sklearn") if name in sys.modules]
    said[" ".join(line)] = [code, heavy, sorted(os.listdir(".")) == before, out.getvalue()]
print(json.dumps(said))
"""

REFUSED = """
train missing.py
train digit
train syntax.py
train nothing.py
train mine.py --set rate=1
train mine.py --set lr=fast
train digits --set rate=1
train digits --set lr=fast
train digits --workers 0
train digits --workers two
train digits --precision bf8
train digits --mesh data=2 --workers 3
train digits --mesh rows=2
train digits --balance 1,2 --workers 3
train digits --resume
train digits --resume --run missing
train digits --run finished
train digits --run finished/result.json
train digits --settings missing.json
train digits --checkpoints nothing://there
train digits --nodes 2
evaluate digits --run missing
evaluate digits --run finished
evaluate syntax.py --run finished
predict digits --run missing
predict digits --run finished --out rows.txt
report missing
checkpoints ls missing
checkpoints export missing --out model.safetensors
checkpoints diff missing missing
verify missing.py
verify digits --set rate=1
verify digits --workers 2
verify missing missing
run missing.py
run -m missing.module
run --workers 0 mine.py
plan digits --workers 0
plan digits --network slow
plan missing.py
slurm missing.py --nodes 2
slurm syntax.py --nodes 2
doctor --workers 0
bench scaling digits --workers 0
bench train missing.py
bench train digits --steps 0
bench collectives --workers 0
bench collectives --sizes few
lint missing.py
show ring --workers 0
show ring --out picture.txt
show mesh --mesh rows=2
show pipeline --schedule none
show data --workers 0
show all-reduce --root 1
"""


def test_nothing_heavy_is_imported_to_refuse_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text("def task(:\n")
    (tmp_path / "nothing.py").write_text("lr = 0.1\n")
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef task(lr: float = 0.1):\n    return torch\n"
    )
    (tmp_path / "finished").mkdir()
    for name in ("lock", "result.json"):
        (tmp_path / "finished" / name).write_text("{}")
    lines = [line.split() for line in REFUSED.strip().splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", EARLY],
        input=json.dumps(lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {
        line: said
        for line, said in found.items()
        if said[:3] != [77 if "--resume --run" in line else 2, [], True]
    } == {}
    assert {
        line: said[3]
        for line, said in found.items()
        if not said[3].startswith("error: ") or said[3].count("\n") != 1
    } == {}
    assert "syntax.py, line 1" in found["train syntax.py"][3]
    assert "it takes lr" in found["train mine.py --set rate=1"][3]


def test_a_task_that_fails_leaves_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("def task():\n    raise ArithmeticError('no data')\n")
    command = [sys.executable, "-m", "lockstep", "train", "fails.py", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ArithmeticError: no data" in done.stderr
    assert "rank-0.log" not in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["fails.py"]
