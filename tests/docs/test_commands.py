"""What the guide prints under a command is what the command prints, where that does not depend
on the machine.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
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


FOUND = list(commands())


def test_commands_are_found() -> None:
    assert {
        "docs/guide/collectives.md",
        "docs/guide/data.md",
        "docs/guide/pipeline.md",
        "docs/guide/slow-links.md",
    } <= {page for page, *_ in FOUND}


@pytest.mark.parametrize(
    ("page", "command", "printed"),
    FOUND,
    ids=[f"{Path(page).stem}: {command}" for page, command, _ in FOUND],
)
def test_it_prints_what_the_page_says(
    page: str, command: str, printed: str, tmp_path: Path
) -> None:
    lockstep_itself, pipe, behind = command.partition(" | ")
    ((_, found),) = launch(said_by, 1, (shlex.split(lockstep_itself), str(tmp_path)))
    if pipe:
        found = subprocess.run(
            ["bash", "-c", behind], input=found, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    assert found.rstrip("\n") == printed.rstrip("\n")
