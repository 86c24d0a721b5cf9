"""How parameters are cut into pieces, and what comes together again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.collectives.addition_order import BLOCK, slice_of
from lockstep.gradients.layout import plan
from lockstep.model_parallel.split_norm import SplitNorm
from lockstep.updates.norm_and_clip import block_sums, norm_of
from lockstep.updates.shards import ELEMENTWISE, check_elementwise, flat_like, pieces_of
from tests.gradients.test_layout import entries
from tests.refused import refused


@given(st.integers(0, 10**6), st.integers(1, 17))
def test_slices_tile_a_tensor_at_blocks(numel: int, size: int) -> None:
    slices = [slice_of(numel, rank, size) for rank in range(size)]
    assert [each.start for each in slices] == [0, *(each.stop for each in slices[:-1])]
    assert slices[-1].stop == numel
    assert all(each.start % BLOCK == 0 or each.start == numel for each in slices)
    assert max(map(len, slices)) - min(map(len, slices)) <= BLOCK + (numel % BLOCK > 0) * BLOCK


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([1, 4096, 2**20]),
)
def test_pieces_tile_every_parameter_and_begin_at_a_vectors_width(
    sizes: list[int], ranks: int, bucket: int
) -> None:
    layout = plan(entries(*sizes), range(len(sizes)), bucket=bucket, first_bucket=bucket)
    pieces: dict[int, list[tuple[int, int]]] = {}
    for rank in range(ranks):
        slices = [slice_of(bucket.numel, rank, ranks) for bucket in layout.buckets]
        for number, piece in pieces_of(layout, slices).items():
            assert number == piece.parameter
            assert piece.start % 64 == 0
            pieces.setdefault(number, []).append((piece.start, piece.stop))
    for number, size in enumerate(sizes):
        parts = sorted(pieces.get(number, []))
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])][: len(parts)]
        assert (parts[-1][1] if parts else 0) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 1023, BLOCK, 300 * BLOCK + 5])
def test_block_sums_have_the_same_bits_in_any_company(dtype: torch.dtype, numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = block_sums(flat)
    for size in (2, 3, 5, 8):
        parts = [
            block_sums(flat[mine.start : mine.stop])
            for mine in (slice_of(numel, rank, size) for rank in range(size))
        ]
        assert torch.equal(torch.cat(parts), whole)
    torch.testing.assert_close(norm_of([whole]), flat.double().norm(), rtol=1e-6, atol=0)
    both = torch.cat([flat, flat]).double().norm()
    torch.testing.assert_close(norm_of([whole, whole]), both, rtol=1e-6, atol=0)


def test_a_norm_that_is_not_finite_stays_so() -> None:
    for value in (torch.inf, torch.nan):
        flat = torch.zeros(3 * BLOCK)
        flat[BLOCK] = value
        assert not norm_of([block_sums(flat)]).isfinite()


class Mine(torch.optim.SGD):
    pass


def test_elementwise_optimizers_of_torch_are_taken_and_others_refused_by_name() -> None:
    for name in ELEMENTWISE:
        check_elementwise(getattr(torch.optim, name))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor, Mine):
        name = f"{kind.__module__}.{kind.__qualname__}"
        with refused("optimizer-not-elementwise", optimizer=name):
            check_elementwise(kind)


def test_a_gradient_that_lies_otherwise_is_put_in_the_parameters_order() -> None:
    weight = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).weight
    gradient = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    found = flat_like(gradient, weight)
    assert torch.equal(found, gradient.permute(0, 2, 3, 1).flatten())
    alike = gradient.to(memory_format=torch.channels_last)
    assert flat_like(alike, weight).data_ptr() == alike.data_ptr()
    assert torch.equal(flat_like(torch.eye(3).to_sparse(), torch.eye(3)), torch.eye(3).flatten())


class OneGradient:
    spread = ()
    device = torch.device("cpu")

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def named(self) -> list[tuple[str, Tensor]]:
        return [("weight", self._gradient)]


def test_the_norm_of_a_split_model_counts_both_parts_of_a_complex_number() -> None:
    gradient = torch.tensor([3 + 4j, 12j], dtype=torch.complex64)
    with lockstep.init() as world:
        norm = SplitNorm(world.group, lambda name: True)
        assert norm(OneGradient(gradient), 2.0).item() == 6.5  # type: ignore[arg-type]
