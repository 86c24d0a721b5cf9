"""Plots lie inside the page: its colours, text as text, every point where it belongs."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as tree

import pytest

from lockstep.tools.drawing import WIDTH, Plot


def drawn() -> Plot:
    plot = Plot(
        (1, 3),
        "step",
        up=(1, 3),
        up_label="loss",
        legend={"a curve": "var(--accent)", "<b>": "var(--waits)"},
    )
    plot.curve([(1, 3.0), (2, 1.0), (3, 2.0)], "var(--accent)", dots=True)
    return plot


def test_colours_are_the_pages_and_text_is_text_on_the_sheet() -> None:
    plot = drawn()
    text = plot.inside()
    colours = {f"var(--{name})" for name in ("ink", "faint", "accent", "waits")}
    assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', text)) == {"none", *colours}
    assert ">a curve</text>" in text
    assert ">&lt;b&gt;</text>" in text
    assert not re.search(r"http|<\?xml|<!|#| id=", text)
    for element in tree.fromstring(text):
        assert 0 <= float(element.get("x", "0")) <= WIDTH
        assert 0 <= float(element.get("y", "0")) <= plot.height


def test_points_are_where_the_axes_say() -> None:
    plot = drawn()
    circles = [element for element in tree.fromstring(plot.inside()) if element.tag == "circle"]
    assert [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in circles] == [
        (pytest.approx(plot.x(x), abs=0.05), pytest.approx(plot.y(y), abs=0.05))
        for x, y in ((1, 3), (2, 1), (3, 2))
    ]
    assert plot.y(3) < plot.y(1)
    assert plot.x(1) < plot.x(3)
    single = Plot((3, 3), "step", up=(0.0, 0.0))
    assert 0 < single.x(3) < WIDTH
    assert 0 < single.y(0.0) < single.height


def test_a_curve_is_interrupted_where_it_is_not_finite() -> None:
    plot = Plot((1, 5), "step", up=(0, 1))
    before = plot.inside().count("<polyline")
    plot.curve([(1, 0.5), (2, 0.6), (3, math.nan), (4, 0.7), (5, 0.8)], "red")
    assert plot.inside().count("<polyline") == before + 2
    plot.curve([(1, math.inf), (2, 0.6), (3, math.nan)], "red")  # a point of its own is a dot
    assert plot.inside().count("<circle") == 1
