"""Apply all rules to one file, drop the findings that its comments ignore, and apply safe fixes.

A comment on the reported line, `# lockstep: ignore[rule]` (or several rules, with commas), removes
the rule's finding. An unknown rule name in the comment is itself a finding: otherwise a misspelt
name would have no effect, silently.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lockstep.errors import UsageError, sentence
from lockstep.tools.lint.rules import RULES
from lockstep.tools.lint.script import Problem, Script

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows these itself when it runs the file
            tree = ast.parse(source)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        script = Script(tree, source.decode(encoding))
        findings, fixes = _findings(script, file)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, or the encoding
        line = getattr(error, "lineno", None) or 1
        reason = getattr(error, "msg", str(error))
        raise UsageError("not-python", file=file, place=f":{line}", reason=reason) from error
    except (RecursionError, MemoryError) as error:
        reason = "its code is nested too deeply"
        raise UsageError("cannot-read", name="file", file=file, reason=reason) from error
    fixed = _fixed(script.source, fixes).encode(encoding) if fixes else None
    return Checked(findings, fixed)


def _findings(script: Script, file: str) -> tuple[list[LintFinding], list[Problem]]:
    """The findings in the order of lines, and the problems that can be fixed."""
    findings: dict[tuple[int, str], LintFinding] = {}
    fixes: list[Problem] = []
    ignored = _ignored(script)
    for code, rule in RULES.items():
        for problem in rule(script):
            line = problem.node.lineno
            if code in ignored.get(line, ()):
                continue
            message = sentence(code, problem.values)
            findings.setdefault((line, code), LintFinding(file, line, code, message))
            if problem.fix is not None:
                fixes.append(problem)
    for line, names in ignored.items():
        for name in names:
            if name not in RULES:
                message = sentence(UNKNOWN, {"name": name, "rules": list(RULES)})
                findings[line, name] = LintFinding(file, line, UNKNOWN, message)
    return sorted(findings.values()), fixes


def _ignored(script: Script) -> dict[int, list[str]]:
    """The rules that comments ask to ignore, by line."""
    ignored = {}
    for token in tokenize.generate_tokens(io.StringIO(script.source).readline):
        match = _COMMENT.search(token.string)
        if match and token.type == tokenize.COMMENT:
            ignored[token.start[0]] = re.split(r"\s*,\s*", match[1].strip())
    return ignored


def _fixed(source: str, problems: list[Problem]) -> str:
    """Return the source with each problem's node replaced by its fix. A node inside another one
    waits for the next run. The columns of a syntax tree count bytes of UTF-8.
    """
    text = source.encode()
    lengths = [len(line) for line in text.splitlines(keepends=True)]
    starts = list(accumulate(lengths, initial=0))
    fixed = b""
    done = 0
    for problem in sorted(problems, key=_position):
        node = problem.node
        first = starts[node.lineno - 1] + node.col_offset
        if first >= done:
            fixed += text[done:first] + str(problem.fix).encode()
            done = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    return (fixed + text[done:]).decode()


def _position(problem: Problem) -> tuple[int, int]:
    return problem.node.lineno, problem.node.col_offset
