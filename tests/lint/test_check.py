"""A file through all rules: suppression, what cannot be read, and that our own code is clean."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from lockstep.errors import UsageError
from lockstep.lint import Finding, check_file, check_text
from lockstep.lint.rules import NAMES, RULES

ROOT = Path(__file__).parents[2]
OURS = [*sorted((ROOT / "examples").glob("*.py")), *sorted(Path(lockstep.__file__).parent.rglob("*.py"))]
WRONG = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier(){}\n"
RULE = "rank-conditional-collective"


def test_there_are_files_of_ours() -> None:
    assert len(OURS) > 40


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_own_code_is_clean(path: Path) -> None:
    assert check_file(path) == []


def test_every_name_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guide/lint.md").read_text()
    assert len(set(NAMES)) == len(NAMES) == len(RULES) + 1
    assert [name for name in NAMES if f"## {name}" not in guide] == []


def test_the_guide_prints_what_is_found() -> None:
    guide = (ROOT / "docs/guide/lint.md").read_text()
    script = guide.split("```python\n", 1)[1].split("```", 1)[0]
    printed = [line.strip() for line in guide.splitlines() if line.startswith("    train.py:")]
    assert [str(finding) for finding in check_text(script, "train.py")] == printed


@pytest.mark.parametrize("comment", [f"  # lockstep: ignore[{RULE}]", f"  # one process here  # lockstep:ignore[no-sync-tail, {RULE}]"])
def test_a_comment_on_the_line_takes_it_away(comment: str) -> None:
    assert len(check_text(WRONG.format(""))) == 1
    assert check_text(WRONG.format(comment)) == []


@pytest.mark.parametrize(
    "comment", ["  # lockstep: ignore[no-sync-tail]", "  # noqa", f"\n# lockstep: ignore[{RULE}]", "  # lockstep: ignore"]
)
def test_another_rule_or_another_line_does_not(comment: str) -> None:
    assert [finding.rule for finding in check_text(WRONG.format(comment))] == [RULE]


def test_a_misspelt_rule_is_reported() -> None:
    found = check_text(WRONG.format("  # lockstep: ignore[rank-conditional]"))
    assert [finding.rule for finding in found] == [RULE, "unknown-rule"]
    assert "ignore[rank-conditional] names no rule; the rules are no-sync-modulo, " in found[1].message


def test_a_comment_in_a_string_is_none() -> None:
    assert check_text("x = '# lockstep: ignore[nothing]'\n") == []


def test_findings_are_in_the_order_of_lines_and_one_line_each() -> None:
    text = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier()\n    dist.barrier(); dist.all_reduce(t)\n"
    found = check_text(text, "train.py")
    assert [finding.line for finding in found] == [3, 4]
    assert all(isinstance(finding, Finding) and "\n" not in str(finding) for finding in found)
    assert str(found[0]).startswith("train.py:3: rank-conditional-collective: only rank 0 would reach dist.barrier(), ")


def test_what_is_not_python(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(UsageError, match=r"broken\.py:2: not Python 3\.\d+: invalid syntax"):
        check_file(path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*missing\.py: No such file"):
        check_file(tmp_path / "missing.py")
    with pytest.raises(UsageError, match="is a folder; name Python files"):
        check_file(tmp_path)
    binary = tmp_path / "model.pt"
    binary.write_bytes(b"PK\x03\x04\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read .*model\.pt as Python"):
        check_file(binary)
    (tmp_path / "null.py").write_bytes(b"x = 1\x00")
    with pytest.raises(UsageError, match=r"null\.py"):
        check_file(tmp_path / "null.py")


def test_the_encoding_that_a_file_declares(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# coding: latin-1\n# é\n".encode("latin-1") + WRONG.format("").encode())
    assert [finding.line for finding in check_file(path)] == [5]


def test_a_warning_of_the_file_is_not_ours() -> None:
    assert check_text("x = '\\d'\n1 is 1\n") == []
