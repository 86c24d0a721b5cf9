"""Every code block of every how-to page, and of the tutorial on replay, does what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, not_run, run_page

pytestmark = pytest.mark.rest

HOW_TO = ROOT / "docs" / "how-to"
TUTORIAL = ROOT / "docs" / "tutorials" / "what-happened-in-step-312.md"
PAGES = [*sorted(HOW_TO.glob("[!R]*.md")), TUTORIAL]
NOT_RUN = {"docker": 2} | dict.fromkeys(("quiet-output", "two-machines", "verify-in-ci"), 1)


def test_few_blocks_are_not_run() -> None:
    blocks = {page.stem: len(not_run(page)) for page in PAGES}
    assert {page: count for page, count in blocks.items() if count} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run_page(page, folder)
