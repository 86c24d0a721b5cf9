"""docs/explore/index.html in a real browser: its numbers are those of `lockstep plan`, its rounds
those of the schedules.
"""

from __future__ import annotations

import itertools
import json
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs import Settings
from lockstep.schedules.algorithms import schedule
from lockstep.schedules.network import Network
from lockstep.tools.plan.forecast import forecasts
from lockstep.tools.plan.networks import TCP
from lockstep.tools.plan.work import given_work
from lockstep.tools.show.schedule_picture import rounds
from tests.browser import Page, browser, require
from tests.cli.command import command

pytestmark = pytest.mark.rest

FOLDER = Path(__file__).parents[2] / "docs" / "explore"
FILE = FOLDER / "index.html"
ALGORITHMS = ("ring", "tree", "halving_doubling", "central")
GRID = [
    dict(zip(("algorithm", "workers", "megabytes", "buckets", "compute", "latency", "rate"), each, strict=True))
    for each in itertools.product(
        ALGORITHMS, (2, 3, 7, 8, 16), (0.001, 100.3), (1, 3, 64), (0.5, 250), (0, 35.5), (0.1, 400)
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    require()
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.open(FILE, width=1000)
        yield page


def test_the_data_are_those_of_the_code() -> None:
    """If this fails: python docs/explore/schedules.py"""
    page = FILE.read_text(encoding="utf-8")
    assert runpy.run_path(str(FOLDER / "schedules.py"))["filled"](page) == page


def planned(setting: dict[str, Any]) -> dict[str, float]:
    work = given_work(setting["megabytes"], setting["buckets"], setting["compute"])
    network = Network.flat(setting["latency"] / 1e6, TCP * setting["rate"] * 1e9 / 8)
    method = Settings(task="page", reduce=setting["algorithm"])
    (step,) = forecasts(lambda workers: work, [setting["workers"]], 1, network, method)
    return {
        "step": step.step,
        "efficiency": step.efficiency,
        "exposed": step.parts["network"],
        "communication": step.communication,
        "sent": step.sent,
    }


def test_its_numbers_are_the_plans(tab: Page) -> None:
    found = json.loads(tab.value(f"JSON.stringify({json.dumps(GRID)}.map(stepOf))"))
    assert len(found) == len(GRID) == 4 * 5 * 2 * 3 * 2 * 2 * 2
    for setting, step in zip(GRID, found, strict=True):
        for name, value in planned(setting).items():
            near = pytest.approx(value, rel=1e-6, abs=1e-9 * step["step"])
            assert step[name] == near, (setting, name)


def test_its_rounds_are_the_schedules(tab: Page) -> None:
    for algorithm, world in itertools.product(ALGORITHMS, (2, 3, 5, 8)):
        of = f"DATA.schedules.{algorithm}[{world}]"
        counts = f"[...Array(roundsOf({of}).length + 1).keys()]"
        held = f"heldAfter({of}, {world}, count).map(cells => cells.map(one => [...one].sort()))"
        found = json.loads(tab.value(f"JSON.stringify({counts}.map(count => {held}))"))
        assert found == [
            [
                [sorted(step.contents[rank][cell]) for cell in step.contents[rank]]
                for rank in range(world)
            ]
            for step in rounds(schedule("all_reduce", algorithm, world))
        ]


def test_a_cell_says_which_ranks_it_counts(tab: Page) -> None:
    told = json.loads(
        tab.value(
            "JSON.stringify([[[0], 20], [[0, 1, 2, 5], 40], [[3, 4], 20], [[0, 2, 4, 6], 20]]"
            ".map(([ranks, room]) => inside(new Set(ranks), room)))"
        )
    )
    assert told == ["0", "0-2,5", "3-4", "(4)"]


def test_the_command_that_it_shows_gives_what_it_shows(tab: Page, tmp_path: Path) -> None:
    tab.open(FILE, width=1280)  # as another test left it, a field may be empty
    chosen = "form.elements.algorithm.value = 'tree', form.elements.workers.value = 5, show()"
    told = "element('command').textContent, element('figures').textContent, stepOf(settingsNow())"
    shown, figures, step = json.loads(tab.value(f"{chosen}, JSON.stringify([{told}])"))
    typed = shlex.split(shown)
    command(*typed[1:], json=tmp_path / "plan.json")
    (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert (typed[:2], row["workers"]) == (["lockstep", "plan"], 5)
    assert row["step_ms"] == pytest.approx(1e3 * step["step"], rel=1e-6)
    assert row["efficiency"] == pytest.approx(step["efficiency"], rel=1e-6)
    assert figures.startswith(f"Step{row['step_ms']:.1f} ms")


def test_by_keyboard_and_on_a_phone(tab: Page) -> None:
    tab.open(FILE, width=390, dark=True)
    assert tab.value("document.documentElement.scrollWidth") <= 390
    tab.value("element('next').focus()")
    for kind in ("keyDown", "keyUp"):
        tab.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13)  # fmt: skip
    assert tab.value("element('where').textContent") == "1 of 6"
    assert tab.value("document.querySelectorAll('#schedule path').length") == 4
    tab.value("form.elements.megabytes.value = ''; show()")
    assert tab.value("element('problem').textContent").startswith("Gradients: enter a number")
    assert not tab.complaints
    assert set(tab.requests) <= {FILE.as_uri(), "data:,"}
