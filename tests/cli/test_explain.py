"""`lockstep explain`: an entry of errors.toml, however its code was copied."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError, catalog
from tests.cli.command import command
from tests.refused import refused


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    command("explain", *words)
    return capsys.readouterr().out


def test_an_entry_with_its_cause_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, "missing-argument")
    entry = catalog()["missing-argument"]
    assert text.splitlines()[0] == "missing-argument"
    assert "    <name> is missing. `<command> -h` lists the arguments.\n" in text
    words = " ".join(text.split())
    assert f"Cause: {entry['cause']}" in words
    assert f"Fix: {entry['fix']}" in words
    # braces of the sentence itself
    words = " ".join(explained(capsys, "nothing-to-measure").split())
    assert "fn=(output, batch) -> {name: (sum, weight)}" in words


def test_a_code_however_it_was_copied(capsys: pytest.CaptureFixture[str]) -> None:
    for copied in (
        ["[no-sbatch]"],
        ["error:", "no-sbatch"],
        ["error: no-sbatch"],
        ["No-Sbatch"],
        ["`no-sbatch`."],
        [f"error: {UsageError('no-sbatch')}"],
        ["error: a [list] of files is missing [no-sbatch]\n  its stack"],
    ):
        assert explained(capsys, *copied).startswith("no-sbatch\n"), copied


def test_an_unknown_code_names_the_nearest() -> None:
    for typed, near in (("no-sbach", "no-sbatch"), ("missing-arg", "missing-argument")):
        with refused("unknown-code", value=typed) as caught:
            command("explain", typed)
        assert caught.value.values["near"].startswith(f" (did you mean {near}")
    with refused("unknown-code", value="qqq", near=""):
        command("explain", "qqq")


def test_all_of_them_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys)
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == sorted(catalog())
    assert all(entry["fix"] in text for entry in catalog().values())
