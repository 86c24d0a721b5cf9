"""M11: ten samples on eight ranks. A padding sampler scores sixteen, six of them twice; here
each counts once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from tests.teams import on_team


class Half(Dataset[tuple[Tensor, int]]):
    """The first half is right, the second is wrong; drawing noise, which belongs to the sample."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (
            torch.tensor([float(index < self.count / 2), index + 0.1 * float(torch.rand(()))]),
            index,
        )


def measure(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
    return {
        "accuracy": (output[:, 0].sum(), len(output)),
        "noise": (output[:, 1].sum(), len(output)),
        "never": (output.sum() * 0, 0),
    }


Evaluated = dict[int, tuple[dict[str, str], list[list[float]]]]


def evaluated(world: lockstep.World) -> Evaluated:
    results = {}
    for count in (1, 7, 10, 64):
        metrics = lockstep.evaluate(nn.Identity(), Half(count), measure, batch=3)
        rows = lockstep.predict(nn.Identity(), Half(count), batch=3)
        results[count] = ({name: value.hex() for name, value in metrics.items()}, rows.tolist())
    return results


@pytest.fixture(scope="module")
def alone() -> Evaluated:
    return on_team(evaluated, 1)[0]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_m11_each_sample_once_and_the_same_bits(workers: int, alone: Evaluated) -> None:
    metrics, rows = alone[10]
    assert float.fromhex(metrics["accuracy"]) == 0.5
    assert metrics["never"] == "nan"
    assert [int(index) for _, index in rows] == list(range(10))
    assert on_team(evaluated, workers) == [alone] * workers
