"""Pictures lie inside the page: no ids in common, the page's colours, text as text."""

from __future__ import annotations

import re

import pytest

from lockstep.errors import UsageError
from lockstep.extras import install
from lockstep.measure.page import svg
from lockstep.measure.page.svg import ACCENT, INK, PHASE_COLOURS, Picture


def drawn(name: str) -> str:
    picture = Picture(name, 2.0)
    picture.axes.plot([1, 2, 3], [3, 1, 2], color=ACCENT, marker="o", label="a curve")
    picture.axes.barh([0], [1], color=PHASE_COLOURS["waits"])
    picture.axes.text(1, 1, "words", color=INK)
    picture.legend()
    return picture.svg()


def test_colours_are_the_pages() -> None:
    text = drawn("one")
    for variable in ("accent", "ink", "faint", "waits"):
        assert f"var(--{variable})" in text
    assert not set(re.findall(r"#[0-9a-f]{6}", text)) - {"#000000"}  # of what is defined and not drawn


def test_text_is_text() -> None:
    text = drawn("one")
    assert ">words</text>" in text
    assert "DejaVu" not in text


def test_ids_are_used_once_and_found() -> None:
    text = drawn("one") + drawn("two")
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    used = {*re.findall(r'href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)}
    assert used
    assert used <= set(ids)


def test_nothing_of_a_file_of_its_own_is_left() -> None:
    text = drawn("one")
    assert text.startswith('<svg viewBox="0 0 360 144" role="img"')
    assert not re.search(r"http|<metadata|<\?xml|<!", text)


def test_it_is_the_same_every_time() -> None:
    assert drawn("one") == drawn("one")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match=re.escape(install("plot"))):
        svg.Picture("one", 1.0)
