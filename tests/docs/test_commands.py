"""What the guide prints under a command is what the command prints, where that does not depend
on the machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lockstep import launch
from tests.docs.pages import ROOT, said_by

pytestmark = pytest.mark.rest

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EVERYWHERE = re.compile(r"lockstep (show |plan .*--step-ms )")


def commands() -> Iterator[tuple[str, str, str]]:
    """Page, command, and what stands under it up to the next one."""
    for page in sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]):
        if page.parent.name == "how-to":  # test_how_to.py runs all of these
            continue
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, printed = piece.partition("\n")
                if _EVERYWHERE.match(command):
                    yield str(page.relative_to(ROOT)), command, printed


def run(lines: Sequence[str], folder: str) -> list[str]:
    """What each of these commands prints, one after the other in this process."""
    return [said_by(shlex.split(line), folder)[1] for line in lines]


def test_they_print_what_the_page_says(tmp_path: Path) -> None:
    found = list(commands())
    for page in ("collectives", "data", "pipeline", "slow-links"):
        assert f"docs/guide/{page}.md" in {page for page, *_ in found}
    parts = [command.partition(" | ") for _, command, _ in found]
    (outputs,) = launch(run, 1, ([line for line, *_ in parts], str(tmp_path)))
    wrong = []
    for (page, command, expected), (_, _, behind), output in zip(
        found, parts, outputs, strict=True
    ):
        if behind:
            pipe = ["bash", "-c", behind]
            output = subprocess.check_output(pipe, input=output, text=True)
        if output.rstrip("\n") != expected.rstrip("\n"):
            wrong.append(f"{page}: $ {command}\n{output}")
    assert not wrong, "\n".join(wrong)
