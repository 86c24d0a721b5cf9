"""Codes: each error has one, each has an entry, and the entry's places are the raise's values."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

import lockstep
from lockstep import errors
from lockstep.cli.explain import explain, page
from lockstep.errors import BarrierTimeout, LaunchTimeout, LockstepError, UsageError, catalog

SOURCE = Path(lockstep.__file__).parent
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, LockstepError)
}


CATALOG = catalog()


def raised() -> Iterator[tuple[Path, ast.Call]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in KINDS and path.name != "errors.py":
                    yield path, node


def fields(message: str) -> set[str]:
    return {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(message) if name}


def test_every_error_has_a_code_and_the_values_of_its_sentence() -> None:
    wrong = []
    for path, call in raised():
        where = f"{path.relative_to(SOURCE)}:{call.lineno}"
        first = call.args[0] if call.args else None
        if len(call.args) != 1 or isinstance(first, ast.JoinedStr | ast.BinOp):
            wrong.append(f"{where}: the first and only argument is a code, or another's sentence")
        elif isinstance(first, ast.Constant):
            entry = CATALOG.get(first.value)
            if entry is None:
                wrong.append(f"{where}: {first.value!r} has no entry in errors.toml")
                continue
            given = {keyword.arg for keyword in call.keywords}
            named = fields(entry["message"])
            if None not in given and named - given:
                wrong.append(f"{where}: {first.value} lacks {sorted(named - given)}")
    assert not wrong, "\n".join(wrong)


def test_every_entry_is_raised_and_complete() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    for code, entry in CATALOG.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code), code
        assert f'"{code}"' in text, f"nothing raises {code}"
        assert list(entry) == ["message", "cause", "fix"], code
        assert all(value.strip() for value in entry.values()), code
        assert entry["cause"].endswith(".")
        assert entry["fix"].endswith(".")

    codes = re.findall(r"^\[\w+\.([\w-]+)\]", (SOURCE / "errors.toml").read_text(), re.M)
    assert sorted(codes) == sorted(CATALOG), "a code is there twice"
    assert {code: errors.entry_of(code) for code in CATALOG} == CATALOG
    assert not errors.entry_of("no-such-code")
    assert errors.sentence("no-such-code", {"a": 1}) == "no-such-code, a=1"


def test_explain_without_a_code_prints_every_entry(capsys: pytest.CaptureFixture[str]) -> None:
    """The site's page of errors is this text."""
    explain()
    printed = capsys.readouterr().out
    assert printed == f"{page(CATALOG)}\n"
    sections = dict(section.split("\n\n", 1) for section in printed.split("\n## ")[1:])
    assert list(sections) == sorted(CATALOG)
    for code, entry in CATALOG.items():
        assert f"{entry['cause']}\n\n**Fix.** {entry['fix']}" in sections[code]


def test_an_error_says_its_sentence_and_its_code() -> None:
    error = UsageError("unknown-choice", name="reduce", value="rang", choices=("ring", "tree"))
    assert str(error) == "reduce='rang' is unknown. Choose one of ring, tree. [unknown-choice]"
    assert (error.code, error.values["value"]) == ("unknown-choice", "rang")
    assert error.sentence == "reduce='rang' is unknown. Choose one of ring, tree."
    assert str(error.within("a.toml")).startswith("a.toml: reduce='rang' is")


def test_the_code_is_read_from_the_first_line_also_of_what_another_rank_said() -> None:
    first = UsageError("resume-without-run")
    for text, code in (
        (str(first), first.code),
        ("no code, only words", ""),
        ("rank 0 failed: bad layer\n  return shape + [rows-1]", ""),
        ("rank 1 is late [barrier-timeout]\n  its stack", "barrier-timeout"),
    ):
        error = LockstepError(text)
        assert (error.code, str(error)) == (code, text)


def test_an_error_can_be_copied() -> None:
    for error in (
        copy.copy(BarrierTimeout("barrier-timeout", missing=[1], late=2)),
        pickle.loads(pickle.dumps(BarrierTimeout("barrier-timeout", missing=[1], late=2))),
    ):
        assert (error.missing, error.values["late"], error.code) == ((1,), 2, "barrier-timeout")
    also_an_os_error = pickle.loads(pickle.dumps(LaunchTimeout("some words", running=[0])))
    assert (str(also_an_os_error), also_an_os_error.running) == ("some words", (0,))
