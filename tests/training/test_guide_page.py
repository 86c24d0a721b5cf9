"""The examples of docs/guide/training.md and evaluation.md do what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep

pytestmark = pytest.mark.rest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "training.md"


def test_the_fields_that_are_easily_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = [
        each
        for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "EarlyStopping" in each
    ]
    names: dict[str, object] = {}
    exec(text, names)
    with lockstep.init(backend="gloo"):
        result = lockstep.train(names["task"](), run=tmp_path / "run", device="cpu")  # type: ignore[operator]
    assert result.stopped_early is not None
    assert result.epochs < 20
    assert capsys.readouterr().out.count("accuracy") == result.epochs


def test_torchmetrics_objects(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.with_name("evaluation.md").read_text()
    (text,) = re.findall(r"```python\n(.*?)```\n\n```text\n(?:.*?)```", page, re.DOTALL)
    exec(text, {})
    assert sorted(eval(capsys.readouterr().out)) == ["auroc", "confidence", "f1", "loss"]
