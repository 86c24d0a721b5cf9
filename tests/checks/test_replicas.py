"""The number that stands for a tensor: equal for equal bits, different when one element changes, whatever the tensor is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.checks.replicas import checksum

torch.manual_seed(0)
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


def test_octets_of_the_rest_are_not_just_added_up() -> None:
    """Of what lies behind the last whole word."""
    for first, second in (([1, 2, 3], [3, 2, 1]), ([0, 255], [255, 0]), ([1, 1, 1, 1, 1], [0, 2, 1, 1, 1])):
        one, other = (torch.tensor(octets, dtype=torch.uint8) for octets in (first, second))
        assert checksum(one) != checksum(other)
    words = torch.tensor([7, 7, 7, 7, 7, 7, 7, 7, 1, 2], dtype=torch.uint8)
    assert checksum(words) != checksum(torch.tensor([7, 7, 7, 7, 7, 7, 7, 7, 2, 1], dtype=torch.uint8))


def test_an_empty_tensor_has_one() -> None:
    assert checksum(torch.zeros(0, 3)) == 0
