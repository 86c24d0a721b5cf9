"""Gradients by our own schedules: several buckets under way at once, every message counted, a
peer that dies named.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.gradients.reductions import reduction
from lockstep.testing import run_ranks
from tests.refused import refused

ELEMENTS = 4 * (64 * 64 + 64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def one_step(world: lockstep.World, reduce: str) -> tuple[list[Tensor], int, int, str]:
    """Gradients, bytes that this rank sent for them, buckets, how the reduction calls itself."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = lockstep.Stepper(
        model, optimizer, reduce=reduce, bucket_mb=0.02, checks="off", world=world
    )  # type: ignore[arg-type]
    data = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).tensor_split(world.size)[
        world.rank
    ]
    for _ in range(2):  # the second one in the order in which gradients arrive
        before = world.group.bytes_sent
        for (x,) in stepper.micro_batches([(data,)]):
            stepper.backward(model(x).square().sum(), weight=len(x))
        stepper.step()
    gradients = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    return (
        gradients,
        world.group.bytes_sent - before,
        len(stepper.reducer.buckets),
        stepper.reducer.reduction.name,
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("reduce", ["ring", "tree", "halving_doubling"])
def test_the_sum_is_there_on_every_rank_and_every_byte_is_counted(
    reduce: str, workers: int
) -> None:
    model = net()
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    (model(x).square().sum() / 12).backward()
    ranks = run_ranks(one_step, workers, args=(reduce,))
    for gradients, _, buckets, name in ranks:
        assert buckets > 1
        assert name == reduce.replace("_", "-")
        for parameter, ours, first in zip(model.parameters(), gradients, ranks[0][0], strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours, first)
    sent = [rank[1] for rank in ranks]
    whole = 4 * ELEMENTS
    if reduce == "tree":  # up one edge each, and down: W - 1 edges, both ways
        assert sum(sent) == pytest.approx(2 * (workers - 1) * whole, rel=0.01)
    elif reduce == "ring" or workers != 3:
        assert sent == pytest.approx([2 * (workers - 1) / workers * whole] * workers, rel=0.01)


def test_an_unknown_one_lists_the_known() -> None:
    with refused("unknown-choice", name="reduce", value="star") as caught:
        reduction("star", None)  # type: ignore[arg-type]
    known = {"auto", "native", "central", "ring", "tree", "halving_doubling"}
    assert known < set(caught.value.values["choices"])
