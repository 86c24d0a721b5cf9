"""docs/pictures: each is what its command draws today, and no word leaves its sheet; nor does one of a
picture of another size.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.browser import browser, require
from tests.cli.command import command

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
LISTED = dict(
    re.findall(r"^\| \[([\w.]+)\]\(\1\) \| `(.*?)` \|", (FOLDER / "README.md").read_text(), re.M)
)
MEASURED = {"buckets.svg", "memory.svg", "loss.svg", "averaging.svg", "scaling.svg"}
OTHERS = [
    "data --samples 31 --workers 5 --epochs 2 --shuffle --drop-last",
    "ring --workers 3",
    "central --workers 9",
    "halving-doubling --workers 7",
    "hierarchical --workers 12 --ranks-per-node 4",
    "mesh --mesh data=2,shard=2,pipeline=2,tensor=2 --nodes 2 --batch 3",
    "mesh --mesh data=12",
    "pipeline --schedule gpipe --stages 4 --micro-batches 12",
    "pipeline --schedule naive --stages 2 --micro-batches 2",
]


def test_all_pictures_are_listed_with_their_commands() -> None:
    assert sorted(LISTED) == sorted(each.name for each in FOLDER.glob("*.svg"))
    assert all(line.endswith(f" --out {name}") for name, line in LISTED.items())


@pytest.mark.parametrize("name", sorted(LISTED.keys() - MEASURED))
def test_it_is_what_the_command_draws(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(LISTED[name])
    if program == "python":
        monkeypatch.setattr(sys, "argv", [str(ROOT / arguments[0]), *arguments[1:]])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        command(*arguments)
    assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_no_word_leaves_its_picture(tmp_path: Path) -> None:
    """In a browser, with the fonts of this machine, where a picture is shown by itself."""
    require()
    others = [tmp_path / f"{number}.svg" for number in range(len(OTHERS))]
    for words, file in zip(OTHERS, others, strict=True):
        command("show", *words.split(), "--out", str(file))
    outside = """[...document.querySelectorAll('text')].filter(each => {
        const box = each.getBoundingClientRect(), sheet = document.rootElement.getBoundingClientRect();
        return box.left < sheet.left || box.right > sheet.right || box.bottom > sheet.bottom;
    }).map(each => each.textContent).join()"""
    with browser(tmp_path / "profile") as page:
        for file in [*sorted(FOLDER.glob("*.svg")), *others]:
            for dark in (False, True):
                page.open(file, width=1000, dark=dark)
                assert page.value(outside) == "", file.name
                fill = page.value("getComputedStyle(document.querySelector('text')).fill")
                assert fill == ("rgb(233, 236, 240)" if dark else "rgb(27, 31, 36)"), file.name
