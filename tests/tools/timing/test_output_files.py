"""Files of figures, and tables as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.tools.timing.output_files import table, write_json


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"metrics": {"none": float("nan")}})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "metrics": {"none": "nan"}
    }


def test_columns_are_as_wide_as_their_text_and_numbers_end_at_the_right() -> None:
    assert table(["name", "ms"], [("a", "1.00"), ("longer [x]", 12)]).splitlines() == [
        "name          ms",
        "a           1.00",
        "longer [x]    12",
    ]
