"""The number that stands for a tensor: equal for equal bits, different when one element changes, whatever the tensor is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.checks.replicas import checksum

TENSORS = {
    "float32": torch.randn(33, 7),
    "0-d": torch.tensor(2.5),
    "turned": torch.randn(5, 7).t(),
    "in the middle of another": torch.randn(9)[1:4],
    "bfloat16, odd": torch.randn(3).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "float64": torch.randn(4, dtype=torch.float64),
    "int8": torch.arange(13, dtype=torch.int8),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_one_changed_element_changes_it(tensor: Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor).dtype == torch.int64
    for place in (
        torch.cartesian_prod(*map(torch.arange, tensor.shape)).reshape(-1, max(1, tensor.dim())).tolist() if tensor.dim() else [[]]
    ):
        other = tensor.clone()
        other[tuple(place)] = ~other[tuple(place)] if tensor.dtype == torch.bool else other[tuple(place)] + 1
        assert checksum(other) != checksum(tensor), place


def test_an_empty_tensor_has_one() -> None:
    assert checksum(torch.zeros(0, 3)) == 0
