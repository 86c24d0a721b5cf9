"""docs/pictures: each is what its command draws today, and no word leaves its sheet; nor does one of a
picture of another size.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.tools.bench.speedup import Scaling, ScalingRow
from lockstep.tools.drawing import width_of
from tests.browser import browser, require
from tests.cli.command import command

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
LISTED = dict(
    re.findall(r"^\| \[([\w.]+)\]\(\1\) \| `(.*?)` \|", (FOLDER / "README.md").read_text(), re.M)
)
MEASURED = {"buckets.svg", "loss.svg", "averaging.svg", "scaling.svg"}
OTHERS = [
    "step --workers 8 --batch 30 --micro-batch 4",
    "step --workers 3 --batch 2",
    "data --samples 31 --workers 5 --epochs 2 --shuffle --drop-last",
    "ring --workers 3",
    "central --workers 9",
    "halving-doubling --workers 7",
    "hierarchical --workers 12 --ranks-per-node 4",
    "exact --micro-batches 32 --workers 5",
    "exact --micro-batches 1 --workers 2",
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
    command(*shlex.split(LISTED[name])[1:])
    assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def scaling() -> Scaling:
    """What stands in the guide."""
    page = (ROOT / "docs/guide/scaling.md").read_text(encoding="utf-8")
    printed = page.partition("--rounds 9")[2].partition("```")[0].splitlines()[1:]
    task, where = printed[0].split(" on ", 1)
    rows: list[ScalingRow] = []
    for line in printed:
        if re.fullmatch(r"[\d\s,.%]+", line):
            cells = [float(cell.replace(",", "")) for cell in re.findall(r"[\d,.]+", line)]
            workers, threads, ms, rate, low, high, speedup, share = cells
            row = ScalingRow(
                workers=int(workers),
                samples_per_s=rate,
                low=low,
                high=high,
                speedup=speedup,
                efficiency=share / 100,
                threads=int(threads),
                step_ms=ms,
            )
            rows.append(row)
    assert len(rows) == 3
    return Scaling(
        task=task,
        rows=rows,
        mode="strong",
        constant="strong scaling",
        where=where,
        how="9 turns of 10 steps",
        remarks=[],
        cores=int(re.findall(r"(\d+) cores", where)[0]),
        device="cpu",
    )


def test_the_scaling_picture_is_of_the_figures_in_the_guide(tmp_path: Path) -> None:
    scaling().plot(tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").read_text() == (FOLDER / "scaling.svg").read_text()


def placed(
    root: ElementTree.Element, down: float = 0, right: float = 0
) -> Iterator[tuple[ElementTree.Element, float, float]]:
    """All shapes in their order, and where the corner of their panel is."""
    for each in root:
        if each.tag.endswith("}g"):
            x, y = map(float, each.attrib["transform"][len("translate(") : -1].split())
            yield from placed(each, down + y, right + x)
        else:
            yield each, down, right


def outside(svg: str) -> list[str]:
    """Words that leave the sheet."""
    root = ElementTree.fromstring(svg)
    width, height = (float(each) for each in root.attrib["viewBox"].split()[2:])
    words = []
    for each, down, right in placed(root):
        if not each.tag.endswith("}text"):
            continue
        size, x = float(each.attrib["font-size"]), float(each.attrib["x"]) + right
        y, text = float(each.attrib["y"]) + down, each.text or ""
        wide = width_of(text, size, each.get("font-weight", "normal"))
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[each.attrib["text-anchor"]]
        if left < 0 or left + wide > width or y - size < 0 or y + 0.3 * size > height:
            words.append(text)
    return words


@pytest.mark.parametrize("words", OTHERS)
def test_no_word_leaves_a_picture_of_another_size(words: str, tmp_path: Path) -> None:
    command("show", *words.split(), "--out", str(tmp_path / "other.svg"))
    assert outside((tmp_path / "other.svg").read_text(encoding="utf-8")) == []


def test_no_word_leaves_its_picture_in_a_browser(tmp_path: Path) -> None:
    """With the fonts of this machine, and where a picture is shown by itself."""
    require()
    outside = """[...document.querySelectorAll('text')].filter(each => {
        const box = each.getBoundingClientRect(), sheet = document.rootElement.getBoundingClientRect();
        return box.left < sheet.left || box.right > sheet.right || box.bottom > sheet.bottom;
    }).map(each => each.textContent).join()"""
    with browser(tmp_path / "profile") as page:
        for file in sorted(FOLDER.glob("*.svg")):
            for dark in (False, True):
                page.open(file, width=1000, dark=dark)
                assert page.value(outside) == "", file.name
                fill = page.value("getComputedStyle(document.querySelector('text')).fill")
                assert fill == ("rgb(233, 236, 240)" if dark else "rgb(27, 31, 36)"), file.name
