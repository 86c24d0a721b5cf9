"""The number that stands for tensors: equal for equal bits in the same order, different when one
bit changes or two elements change places.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.checks.digest import chunks, digest, mixed, octets_of

torch.manual_seed(0)
TENSORS = {
    "float32": torch.randn(33, 7),
    "0-d": torch.tensor(2.5),
    "turned": torch.randn(5, 7).t(),
    "in the middle of another": torch.randn(9)[1:4],
    "bfloat16, odd": torch.randn(3).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex128).conj(),
    "float64": torch.randn(4, dtype=torch.float64),
    "int8": torch.arange(13, dtype=torch.int8),
    "expanded": torch.randn(3).expand(2, 3),
    "sparse": torch.eye(3).to_sparse(),
}


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy of its bytes in which one bit is another."""
    octets = octets_of(tensor).clone()
    octets[bit // 8] ^= 1 << bit % 8
    return octets


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_every_bit_counts(tensor: Tensor) -> None:
    whole = digest([tensor])
    assert whole == digest([tensor.clone()]) == digest([octets_of(tensor)])
    assert all(
        digest([flipped(tensor, bit)]) != whole for bit in range(8 * octets_of(tensor).numel())
    )


def test_the_order_of_elements_and_of_tensors_counts() -> None:
    tensor = torch.randn(4, 6)
    assert digest([tensor[[1, 0, 2, 3]]]) != digest([tensor])
    first, second = torch.randn(3), torch.randn(3)
    assert digest([first, second]) != digest([second, first])


def test_the_number_is_signed_and_nothing_has_one() -> None:
    assert all(-(2**63) <= digest([torch.tensor(each)]) < 2**63 for each in range(50))
    assert digest([]) == digest([torch.zeros(0, 3)])


def test_what_a_device_computes_sees_every_bit_and_the_order() -> None:
    words = torch.randint(-(2**62), 2**62, (257,))
    whole = int(mixed(words))
    assert all(
        int(mixed(octets.view(torch.int64))) != whole
        for octets in (flipped(words, bit) for bit in range(0, 257 * 64, 7))
    )
    for first, second in ((0, 1), (3, 131), (5, 256)):
        order = torch.arange(257)
        order[[first, second]] = order[[second, first]]
        assert int(mixed(words[order])) != whole
    assert int(mixed(torch.zeros(3, dtype=torch.int64))) != int(
        mixed(torch.zeros(4, dtype=torch.int64))
    )


def test_a_device_mixes_small_tensors_together_and_large_ones_in_pieces() -> None:
    octets = [torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (5, 64, 200, 1, 8)]
    whole = torch.cat(octets).tolist()
    found = list(chunks(octets, 64))
    assert max(words.numel() for words in found) <= 64 / 8
    assert [each for each in torch.cat(found).view(torch.uint8).tolist() if each] == [
        each for each in whole if each
    ]
