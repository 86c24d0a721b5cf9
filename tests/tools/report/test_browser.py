"""The page in a real browser: quiet, self-contained, as wide as a phone, readable in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.runs import read
from lockstep.tools.report.page import page
from lockstep.tools.report.verdict import verdict
from tests.browser import Page, browser, require
from tests.tools.report.runs import anatomy, make

pytestmark = pytest.mark.rest

DRAWN = "[...document.querySelectorAll('svg')]"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 6 ranks on a host with a long name, with every part in it."""
    require()
    parts = anatomy(6, 8)
    for each in parts.values():
        each[0]["host"] = "a-host-with-a-name-that-does-not-fit-on-a-phone.cluster.example"
    run = make(
        tmp_path_factory.mktemp("run"), parts=parts, workers=6, overrides={"name": "x" * 200}
    )
    out = run / "report.html"
    recorded = read(run)
    assert recorded.timeline is not None
    found = verdict(recorded.timeline, recorded.settings)
    out.write_text(page(recorded, found, "lockstep train digits"), encoding="utf-8")
    return out


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as found:
        yield found


def test_on_a_phone_on_a_desk_in_the_dark_and_on_paper(file: Path, tab: Page) -> None:
    assert file.stat().st_size < 2_000_000
    for width, dark, media in (
        (390, False, "screen"),
        (390, True, "screen"),
        (1280, False, "screen"),
        (700, False, "print"),
    ):
        tab.open(file, width=width, dark=dark, media=media)
        assert tab.value("document.documentElement.scrollWidth") <= width
        widths = tab.value(f"{DRAWN}.map(each => each.getBoundingClientRect().width)")
        assert min(widths) > 200
        # on paper what is folded is printed as well: the memory
        shown = tab.value(f"{DRAWN}.filter(each => each.checkVisibility()).length")
        assert shown == len(widths) - (0 if media == "print" else 1)
        colour = "getComputedStyle(document.body).backgroundColor"
        assert tab.value(colour) == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
        if dark:
            ink = tab.value("getComputedStyle(document.querySelector('svg text')).fill")
            assert ink == "rgb(230, 233, 237)"
    tab.open(file, width=390)
    tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert tab.value("document.documentElement.scrollWidth") <= 390
    assert not tab.complaints
    assert set(tab.requests) <= {file.as_uri(), "data:,"}
