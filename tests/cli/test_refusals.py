"""What is refused: in one style, with the option as it was typed, with exit code 2, before torch is imported, and leaving nothing behind."""

from __future__ import annotations

import pytest

from lockstep.cli import app
from lockstep.cli.refusals import as_typed


def refused(line: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
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
        (["train", "digits", "--max-restarts", "-1"], "--max-restarts -1: ", ["at least 0"]),
        (["train", "digits", "--precision", "bf8"], "--precision bf8 ", ["fp32, bf16"]),
        (["train", "digits", "-n", "0"], "--workers 0: ", []),
        (["train", "digits", "--exact", "--reduce", "central"], "--reduce central with exact", []),
        (["train", "digits", "--staleness", "3"], "--staleness 3 ", ["--update server"]),
        (["train", "digits", "--epochs", "2", "--steps", "3"], "--epochs 2 and --steps 3 ", []),
        (["run", "--workers", "two", "script.py"], "--workers two: ", ["a whole number"]),
        (["show", "data", "--split", "halves"], "--split halves: ", ["interleaved, blocks"]),
        (["show", "nothing"], "no such command 'nothing'", ["lockstep show -h"]),
        (["train", "digits", "more"], "got unexpected extra argument", ["more"]),
    ],
)
def test_the_value_is_named_as_it_was_typed(
    line: list[str], begins: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(line, monkeypatch, capsys)
    assert said.startswith(begins)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("command", "typed", "meant"), [("train", "--worker", "--workers"), ("run", "--work", "--workers"), ("tune", "--devise", "--device")]
)
def test_what_begins_alike_is_suggested_first(
    command: str, typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"(did you mean {meant}" in refused([command, typed, "2", "digits"], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("message", "line", "said"),
    [
        ("timeout=0.0: give more", ["--timeout", "0"], "--timeout 0: give more"),
        ("bucket_mb=0: wrong; bucket_mb too", ["--bucket-mb=0"], "--bucket-mb 0: wrong; --bucket-mb too"),
        ("the task's epochs=0: give more", ["--epochs", "3"], "the task's epochs=0: give more"),
        ("global_batch=3 is odd", ["--epochs", "3"], "global_batch=3 is odd"),
    ],
)
def test_only_what_was_typed_becomes_an_option(message: str, line: list[str], said: str) -> None:
    assert as_typed(message, line) == said
