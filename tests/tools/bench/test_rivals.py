"""benchmarks/rivals.py: Accelerate's and Fabric's steps make the update of torch's DDP."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.tools.bench.training_step import measure
from tests.tools.bench.test_training_step import task

pytestmark = pytest.mark.rest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # accelerate and Fabric set it as they are imported, for good
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    yield importlib.import_module("rivals")
    sys.modules.pop("rivals", None)


def test_they_make_the_update_of_ddp(rivals: Any) -> None:
    variants = [
        name
        for name in ("ddp:25", *rivals.WRAPPERS)
        if name not in rivals.left_out(rivals.WRAPPERS, "fp32")
    ]
    found = measure(task, workers=2, variants=variants, steps=2, others=rivals.WRAPPERS)
    assert [row.variant for row in found.rows] == variants
    assert found.wrong == []
    assert all(row.apart < 1e-4 for row in found.rows if row.apart is not None)
