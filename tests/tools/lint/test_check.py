"""A file through all rules: suppression, what cannot be read, and that our own code is clean."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import UsageError, catalog
from lockstep.tools.lint import RULES, LintFinding, check_file, check_source
from tests.refused import refused

ROOT = Path(__file__).parents[3]
CONCERNED = re.compile(
    r"torch\.distributed|DistributedDataParallel|DistributedSampler|DataLoader|no_sync"
)
WRONG = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier(){}\n"
RULE = "rank-conditional-collective"


def check_text(text: str, file: str = "<text>") -> list[LintFinding]:
    return check_source(text.encode(), file).findings


@pytest.mark.rest
def test_our_own_code_is_clean() -> None:
    folders = (ROOT / "examples", ROOT / "benchmarks", Path(lockstep.__file__).parent)
    files = [path for folder in folders for path in folder.rglob("*.py")]
    concerned = [path for path in files if CONCERNED.search(path.read_text())]
    assert len(concerned) > 40
    assert [finding for path in concerned for finding in check_file(path).findings] == []


def test_the_guide_has_every_rule_and_prints_what_is_found() -> None:
    assert {*RULES, "unknown-rule"} <= set(catalog())
    guide = (ROOT / "docs/guide/lint.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| [^|]+ \| [^|]+ \|[^|]*\|$", guide, re.MULTILINE)
    assert sorted(rows) == sorted(RULES)
    script = guide.split("```python\n", 1)[1].split("```", 1)[0]
    printed = [line.strip() for line in guide.splitlines() if line.startswith("    train.py:")]
    assert [str(finding) for finding in check_text(script, "train.py")] == printed


def test_a_comment_with_the_rule_on_the_line_suppresses_it() -> None:
    for comment, reported in (
        ("", True),
        (f"  # lockstep: ignore[{RULE}]", False),
        (f"  # one process here  # lockstep:ignore[no-sync-tail, {RULE}]", False),
        ("  # lockstep: ignore[no-sync-tail]", True),
        ("  # noqa", True),
        (f"\n# lockstep: ignore[{RULE}]", True),
        ("  # lockstep: ignore", True),
    ):
        findings = check_text(WRONG.format(comment))
        assert [finding.rule for finding in findings] == [RULE] * reported, comment

    misspelt = check_text(WRONG.format("  # lockstep: ignore[rank-conditional]"))
    assert [finding.rule for finding in misspelt] == [RULE, "unknown-rule"]
    assert "ignore[rank-conditional] names no rule" in misspelt[1].message


def test_findings_are_in_the_order_of_lines_and_one_line_each() -> None:
    findings = check_text(WRONG.format("\n    dist.barrier(); dist.all_reduce(t)"), "train.py")
    assert [finding.line for finding in findings] == [3, 4]
    assert not [finding for finding in findings if "\n" in str(finding)]
    assert str(findings[0]).startswith("train.py:3: rank-conditional-collective: only rank 0 would")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.py"
    with refused("cannot-read", file=str(missing), reason="No such file or directory"):
        check_file(missing)
    with refused("cannot-read", file=str(tmp_path), reason="Is a directory"):
        check_file(tmp_path)

    path = tmp_path / "script.py"
    contents: dict[bytes, dict[str, str]] = {
        b"x = 1\ndef f(:\n": {"place": ":2"},
        b"PK\x03\x04\xff\xfe\x00": {},  # of null bytes, Pythons differ in the line
        b"x = 1\x00": {},
        "# é\n".encode("latin-1"): {"place": ":1"},
    }
    for content, values in contents.items():
        path.write_bytes(content)
        with refused("not-python", file=str(path), **values):
            check_file(path)
    # what is nested too deeply
    for content in (b"(" * 3000 + b")" * 3000, b"+".join([b"1"] * 5000)):
        with pytest.raises(UsageError, match=r"(deep|nested).* \[(cannot-read|not-python)\]"):
            check_source(b"x = " + content)


def test_the_encoding_that_a_file_declares(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# coding: latin-1\n# é\n".encode("latin-1") + WRONG.format("").encode())
    assert [finding.line for finding in check_file(path).findings] == [5]


@pytest.mark.parametrize(
    "text",
    [
        "for x in y: i += 1; z = m.no_sync() if i % 4 else n\n",
        (
            "from lockstep import DistributedSampler\nloader = DataLoader(d,"
            " sampler=DistributedSampler(d))\ndef f(a): ...\nfor e in range(3):\n    f(1, 2,"
            " loader)\n"
        ),
        "for x in (): pass\nx = lambda: dist.barrier()\nif rank in (): dist.barrier()\n",
        "x = '\\d'\n1 is 1\n",  # Python warns of both
        "x = '# lockstep: ignore[nothing]'\n",
        *("", "\n", "# a comment", "x = 1"),
        "os.environ.setdefault()\ntorch.manual_seed()\ndist.all_reduce()\nDataLoader()\nDistributedSampler()\n",
    ],
)
def test_unusual_shapes_end_no_rule(text: str) -> None:
    assert check_text(text) == []
