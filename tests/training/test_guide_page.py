"""The example of docs/guide/training.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lockstep

pytestmark = pytest.mark.rest

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(), re.DOTALL)


def test_the_example_does_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = [block for block in blocks("training.md") if "EarlyStopping" in block]
    names: dict[str, Any] = {}
    exec(text, names)
    with lockstep.init(backend="gloo"):
        result = lockstep.train(names["task"](), run=tmp_path / "run", device="cpu")
    assert result.stopped_early is not None
    assert result.epochs < 20
    assert capsys.readouterr().out.count("accuracy") == result.epochs
