"""Files of figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.tools.timing.output_files import write_json


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"metrics": {"none": float("nan")}})
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "metrics": {"none": "nan"}
    }
