"""Tests of a device run on a GPU where there is one, and on the CPU where there is none, so that they
cannot rot; those marked `gpu` need one. With LOCKSTEP_REQUIRE_GPU=1 there must be one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import lockstep

_HERE = torch.cuda.is_available() or os.environ.get("LOCKSTEP_REQUIRE_GPU") == "1"
if _HERE:  # cuBLAS looks once, at its first product, and exact mode comes later
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _HERE:
        pytest.skip("no CUDA device")


@pytest.fixture
def device() -> str:
    return "cuda" if _HERE else "cpu"


@pytest.fixture
def world(device: str) -> Iterator[lockstep.World]:
    with lockstep.init(device=device) as opened:
        assert opened.device.type == device
        yield opened
