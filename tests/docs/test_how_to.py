"""Every code block of every how-to page does what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, not_run, run_page

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
NOT_RUN: set[tuple[str, str]] = set()


def test_few_blocks_are_not_run() -> None:
    assert {each for page in PAGES for each in not_run(page)} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run_page(page, folder)
