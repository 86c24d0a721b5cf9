"""One file through all rules, less what its comments ask to ignore.

A comment on the reported line, `# lockstep: ignore[rule]` (or several, with commas), takes that rule's finding away. A name in it that
is no rule's is a finding itself: a misspelt one would otherwise do nothing, silently.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.lint.finding import Finding
from lockstep.lint.rules import NAMES, RULES
from lockstep.lint.source import Source

UNKNOWN = "unknown-rule"
_COMMENT = re.compile(r"#\s*lockstep:\s*ignore\[([^\]]*)\]")


def check_file(path: Path) -> list[Finding]:
    """What the rules find in a Python file, by line. UsageError for one that cannot be read or is not Python."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name Python files, for example {path / '*.py'}")
    try:
        with tokenize.open(path) as file:  # reads the encoding that the file declares
            text = file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as Python: {error}") from error
    return check_text(text, str(path))


def check_text(text: str, file: str = "<text>") -> list[Finding]:
    """The same for source text; `file` is only what the findings are to say."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own SyntaxWarnings are the interpreter's affair
            source = Source(ast.parse(text))
    except SyntaxError as error:
        raise UsageError(f"{file}:{error.lineno or 1}: not Python {_version()}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"cannot parse {file}: {error}") from error
    ignored = dict(_ignored(text))
    findings = {(problem.line, problem.rule): problem.message for rule in RULES for problem in rule(source)}
    kept = [Finding(file, line, rule, message) for (line, rule), message in findings.items() if rule not in ignored.get(line, ())]
    for line, names in ignored.items():
        known = ", ".join(NAMES)
        kept += [
            Finding(file, line, UNKNOWN, f"ignore[{name}] names no rule; the rules are {known}") for name in names if name not in NAMES
        ]
    return sorted(kept)


def _ignored(text: str) -> Iterator[tuple[int, list[str]]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (found := _COMMENT.search(token.string)):
            yield token.start[0], [name.strip() for name in found[1].split(",")]


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
