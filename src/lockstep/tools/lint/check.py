"""Apply all rules to one file, drop the findings that its comments ignore, and apply safe fixes.

A comment on the reported line, `# lockstep: ignore[rule]` (or several rules, with commas), removes
the rule's finding. An unknown rule name in the comment is itself a finding: otherwise a misspelt
name would have no effect, silently.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from lockstep.errors import UsageError, sentence
from lockstep.tools.lint.rules import RULES
from lockstep.tools.lint.script import Script

UNKNOWN = "unknown-rule"
_COMMENT = re.compile(r"#\s*lockstep:\s*ignore\[([^\]]*)\]")


@dataclass(frozen=True, order=True, slots=True)
class LintFinding:
    """A mistake in a file. `line` counts from 1; `message` says in one line what goes wrong and
    how to repair it.
    """

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Checked:
    """The findings of a file, and its source with the safe fixes applied (None without a fix)."""

    findings: list[LintFinding]
    fixed: bytes | None


def check_file(path: Path) -> Checked:
    """Check a Python file. Raise UsageError if it cannot be read or is not Python."""
    try:
        return check_source(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(
            "cannot-read", name="file", file=str(path), reason=error.strerror or str(error)
        ) from error


def check_source(source: bytes, file: str = "<text>") -> Checked:
    """Check source code in the encoding that it declares. `file` is the name in the findings."""
    try:
        return _checked(Script(_parsed(source, file)), file)
    except RecursionError as error:
        reason = "its code is nested too deeply"
        raise UsageError("cannot-read", name="file", file=file, reason=reason) from error


def _checked(script: Script, file: str) -> Checked:
    findings: dict[tuple[int, str], LintFinding] = {}
    fixes: dict[cst.CSTNode, cst.CSTNode] = {}
    ignored = _ignored(script)
    for code, rule in RULES.items():
        for problem in rule(script):
            line = script.line(problem.node)
            if code in ignored.get(line, ()):
                continue
            message = sentence(code, problem.values)
            findings.setdefault((line, code), LintFinding(file, line, code, message))
            if problem.fix is not None:
                fixes[problem.node] = problem.fix
    for line, names in ignored.items():
        for name in names:
            if name not in RULES:
                message = sentence(UNKNOWN, {"name": name, "rules": list(RULES)})
                findings[line, name] = LintFinding(file, line, UNKNOWN, message)
    fixed = script.module.visit(_Fix(fixes)).bytes if fixes else None
    return Checked(sorted(findings.values()), fixed)


def _ignored(script: Script) -> dict[int, list[str]]:
    """The rules that comments ask to ignore, by line."""
    ignored = {}
    for comment in script.all(cst.Comment):
        if match := _COMMENT.search(comment.value):
            ignored[script.line(comment)] = re.split(r"\s*,\s*", match[1].strip())
    return ignored


def _parsed(source: bytes, file: str) -> cst.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows these itself when it runs the file
            ast.parse(source)  # raises on deeply nested brackets, where LibCST crashes
        return cst.parse_module(source)
    except SyntaxError as error:
        raise UsageError(
            "not-python", file=file, place=f":{error.lineno or 1}", reason=error.msg
        ) from error
    except ValueError as error:  # null bytes, in a Python before 3.11.4
        raise UsageError("not-python", file=file, place="", reason=str(error)) from error
    except (cst.ParserSyntaxError, MemoryError) as error:
        raise UsageError("cannot-read", name="file", file=file, reason=str(error)) from error


class _Fix(cst.CSTTransformer):
    def __init__(self, fixes: dict[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self.fixes = fixes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return self.fixes.get(original_node, updated_node)
