"""The table and the picture."""

from __future__ import annotations

from pathlib import Path

from lockstep.tools.bench.scaling.speedup import Scaling, rows
from tests.refused import refused

STRONG = rows(
    "strong", {1: [(100, 1.0)], 2: [(150, 1.0)]}, {1: 1.0, 2: 1.6}, {1: 2, 2: 1}, steps=10
)
WEAK = rows("weak", {1: [(100, 1.0)], 2: [(1900, 10.0)]}, {1: 1.0, 2: 1.8}, {1: 2, 2: 1}, steps=10)
FOUND = Scaling(
    task="toy",
    rows=(*STRONG, *WEAK),
    modes={"strong": "strong words", "weak": "weak words"},
    where="a machine",
    how="in a way",
    remarks=["believe " * 30],
    cores=1,
    device="cpu",
)


def test_a_table_a_mode() -> None:
    lines = FOUND.describe().splitlines()
    assert lines[:2] == ["toy on a machine", "in a way"]
    strong, weak = lines.index("strong words"), lines.index("weak words")
    assert lines[strong + 3].split() == [
        "2",
        "1",
        "100.00",
        "150",
        "150",
        "150",
        "1.50",
        "75.0",
        "%",
        "80.0",
        "%",
    ]
    assert lines[weak + 3].split() == [
        "2",
        "1",
        "1000.00",
        "190",
        "190",
        "190",
        "1.90",
        "95.0",
        "%",
        "90.0",
        "%",
    ]
    assert len(lines[strong + 1]) == len(lines[strong + 2])  # the head stands over its columns
    assert lines[-3].startswith("believe")
    assert max(map(len, lines)) <= 120


def test_the_picture_has_every_line(tmp_path: Path) -> None:
    file = tmp_path / "scaling.svg"
    FOUND.plot(file)
    drawn = file.read_text()
    for words in (
        "ideal",
        "strong, measured",
        "strong, predicted (dots)",
        "weak, measured",
        "weak, predicted (dots)",
        "more ranks than the 1 core",
    ):
        assert f">{words}</text>" in drawn
    with refused("cannot-write", name="--out", file=str(tmp_path / "nowhere" / "x.svg")):
        FOUND.plot(tmp_path / "nowhere" / "x.svg")
