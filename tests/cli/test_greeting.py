"""`lockstep` alone, and what its help offers to try."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command

from lockstep.cli import app


def printed(*line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["lockstep", *line])
    with pytest.raises(SystemExit) as left:
        app.main()
    assert not left.value.code
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def parsed(line: str) -> str:
    """The command's name. Raises what the parser refuses."""
    root = get_command(app.app)
    with root.make_context("lockstep", shlex.split(line)[1:]) as context:
        name, command, rest = root.resolve_command(context, shlex.split(line)[1:])  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=context):
            return str(name)


def test_lockstep_alone_offers_three_commands_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(monkeypatch=monkeypatch, capsys=capsys)
    tried = re.findall(r"^  (lockstep .+?)  ", said, re.MULTILINE)
    assert [parsed(line) for line in tried] == ["train", "verify", "show"]
    for title, names in app.SECTIONS.items():
        section = said.partition(f"{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\w+)  ", section, re.MULTILINE) == list(names)
    assert max(map(len, said.splitlines())) < 80


@pytest.mark.parametrize("name", ["run", "train", "verify", "plan"])
def test_the_examples_of_a_help_are_commands(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(name, "--help", monkeypatch=monkeypatch, capsys=capsys)
    examples = re.findall(r"^    (lockstep .+?)   ?\S", said, re.MULTILINE)
    assert len(examples) >= 3
    assert {parsed(line) for line in examples} == {name}


@pytest.mark.parametrize("group", ["bench", "checkpoints"])
def test_summaries_are_whole_sentences_as_wide_as_the_terminal(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = printed(group, "--help", monkeypatch=monkeypatch, capsys=capsys)
    monkeypatch.setenv("COLUMNS", "110")
    wide = printed(group, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert not re.search(r"\.\.\.$", wide.partition("Commands:")[2], re.MULTILINE)
    assert max(map(len, narrow.splitlines())) <= 60
    assert max(map(len, wide.splitlines())) <= 110
    assert len(wide.splitlines()) < len(narrow.splitlines())
