"""What is refused: in one style, with the option as it was typed, with exit code 2, before torch
is imported, and leaving nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.refusals import as_typed
from lockstep.errors import TaskError, UsageError
from tests.cli.command import Command, in_a_fresh_interpreter


def refused(lockstep: Command, line: str) -> str:
    ended = lockstep(line)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("line", "begins", "words"),
    [
        ("train", "TASK is missing", ["lockstep train -h"]),
        ("train digits --epochs two", "--epochs two: ", ["a whole number"]),
        ("train digits --timeout=soon", "--timeout soon: ", ["a number"]),
        ("train digits --witness 1%", "--witness 1%", ["--exact"]),
        ("train digits --exact --witness 2", "--witness 2", ["at most 1"]),
        (
            "train digits --on-corruption exclude",
            "--on-corruption exclude",
            ["--ray", "[nothing-to-exclude]"],
        ),
        ("train digits --max-restarts -1", "--max-restarts -1: ", ["at least 0"]),
        ("train digits --precision bf8", "--precision bf8 ", ["fp32, bf16"]),
        ("train digits -n 0", "--workers 0: ", []),
        ("train digits --exact --reduce central", "--reduce central with --exact", []),
        ("train digits --staleness 3", "--staleness 3 ", ["Choose server as update"]),
        ("train digits --mesh=rows=2", "--mesh rows=2: ", ["data"]),
        ("train digits --exact --compress bf16", "--compress bf16 with --exact: ", []),
        ("train digits --update servers", "--update servers is ", ["server"]),
        ("train digits --epochs 2 --steps 3", "--epochs 2 and --steps 3 ", []),
        ("train digits --schedule gpipe", "--schedule gpipe configures a pipeline", []),
        ("train digits --mesh shard=2 --exact", "--exact with --mesh shard=2", []),
        ("run --workers two script.py", "--workers two: ", ["a whole number"]),
        ("run --debug -m this", "--debug needs --log DIR too: ", []),
        ("run --log /dev/null/x -m this", "--log /dev/null/x cannot be made (Not a dir", []),
        ("run --wrokers 2 x.py", "--wrokers is not an option of `lockstep run`", []),
        ("run", "nothing to run. Give a script (lockstep run train.py) or a", []),
        ("doctor --nodes 2", "--nodes 2 is set, but not --node-rank and --rdzv-endpoint", []),
        ("doctor --ray --nodes 2", "--ray and --nodes 2 exclude each other", []),
        ("doctor --json /nowhere/x", "--json /nowhere/x cannot be written", []),
        ("explain no-sbach", "", ["[unknown-code]"]),
        ("show data --split halves", "--split halves: ", ["interleaved, blocks"]),
        ("show nothing", "no such command 'nothing'", ["lockstep show -h"]),
        ("train digits more", "got unexpected extra argument", ["more"]),
    ],
)
def test_the_value_is_named_as_it_was_typed(
    line: str, begins: str, words: list[str], lockstep: Command
) -> None:
    sentence = refused(lockstep, line)
    assert sentence.startswith(begins)
    assert [word for word in words if word not in sentence] == []


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("train --worker 2 digits", "--workers"),
        ("run --work 2 digits", "--workers"),
        ("evaluate --devise 2 digits", "--device"),
        ("show rings", "'ring'"),
        ("show all_reduce", "'all-reduce'"),
        ("show allreduce", "'all-reduce'"),
        ("show brodcast", "'broadcast'"),
    ],
)
def test_what_begins_alike_is_suggested_first(line: str, meant: str, lockstep: Command) -> None:
    assert f"did you mean {meant}" in refused(lockstep, line).lower()


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
train text --mesh pipeline=2 --workers 1:2
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
    answers = in_a_fresh_interpreter(REFUSED.strip().splitlines(), tmp_path)
    for line, answer in answers.items():
        assert answer.code == (77 if "--resume --run" in line else 2), (line, answer.text)
        assert not {"torch", "sklearn"} & {*answer.heavy}, line
        assert not answer.written, line
        assert answer.text.startswith("error: "), line
        assert answer.text.count("\n") == 1, answer.text
    assert "syntax.py, line 1" in answers["train syntax.py"].text
    assert "it takes lr" in answers["train mine.py --set rate=1"].text


def test_a_task_that_fails_leaves_no_run_directory(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "fails.py").write_text("def task():\n    raise ArithmeticError('no data')\n")
    ended = lockstep("train fails.py --device cpu")
    assert ended.code == 1
    assert "ArithmeticError: no data" in ended.err
    assert "rank-0.log" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["fails.py"]
