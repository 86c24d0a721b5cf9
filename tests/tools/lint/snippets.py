"""Scripts as text with their mistakes marked: a line that a rule is to report ends in `# <-
rule`.
"""

from __future__ import annotations

import re
from textwrap import dedent

from lockstep.tools.lint import check_source


def marked(text: str) -> list[tuple[int, str]]:
    return [
        (number, found[1])
        for number, line in enumerate(dedent(text).splitlines(), 1)
        if (found := re.search(r"# <- ([\w-]+)$", line))
    ]


def found(text: str) -> list[tuple[int, str]]:
    return [
        (finding.line, finding.rule) for finding in check_source(dedent(text).encode()).findings
    ]


def agrees(text: str) -> None:
    """The linter reports the marked lines and no others; and every mark is read."""
    assert len(marked(text)) == text.count("# <-")
    assert found(text) == marked(text)
