"""A nan is traced to the rank, the step and the parameter where it came up, before the sum
spreads it.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.errors import LockstepWarning
from tests import zoo
from tests.teams import on_team


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, bad: bool) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        if bad:
            hidden.register_hook(lambda gradient: gradient * torch.nan)
        output: Tensor = self.last(hidden)
        return output


def trained(world: lockstep.World, trace: bool, bad_steps: tuple[int, ...], what: str) -> list[str]:
    """Three steps of two micro-batches; rank 1's second is bad in some steps. Reasons and
    warnings.
    """
    torch.manual_seed(1)
    model = Net()
    stepper = lockstep.Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        clip=1.0,
        trace_nonfinite=trace,
        checks="full",
    )
    reasons = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            x, y = zoo.samples(16)
            for number, rows in enumerate(stepper.micro_batches([slice(0, 4), slice(4, 8)])):
                bad = step in bad_steps and world.rank == 1 and number == 1
                loss = zoo.loss_sum(model(x[rows], bad and what == "gradient"), y[rows])
                stepper.backward(loss * float("inf") if bad and what == "loss" else loss, weight=4)
            reasons.append(stepper.step().reason or "applied")
    for tensor in model.parameters():
        assert torch.isfinite(tensor).all()
    return reasons + [str(one.message) for one in caught if one.category is LockstepWarning]


FOUND = (
    "Before the sum, the first gradient that is not finite: 'second.bias' on rank 1 (micro-batch 1"
    " of its window)"
)


@pytest.mark.parametrize(
    ("trace", "first"),
    [
        (True, FOUND),
        (False, "The next window's gradients are checked one by one, before they are summed"),
    ],
)
def test_a_gradient_of_nan_is_traced(trace: bool, first: str) -> None:
    rank0, rank1 = on_team(trained, 2, (trace, (0, 1), "gradient"))
    reasons = [
        f"the gradient's norm is nan. {first}",
        f"the gradient's norm is nan. {FOUND}",
        "applied",
    ]
    assert rank1 == reasons
    assert rank0[:3] == reasons
    told = [reasons[0]] if trace else reasons[:2]
    assert rank0[3:] == [
        f"step {number} was skipped: {reason}. This warning appears once."
        for number, reason in enumerate(told, 1)
    ]


def test_a_loss_of_inf_is_traced_to_its_rank() -> None:
    for first, reason, last, *_ in on_team(trained, 2, (True, (1,), "loss")):
        assert first == last == "applied"
        assert reason.startswith("the loss is inf: ")
        assert "The loss of rank 1 is not finite." in reason
        assert "'last.bias' on rank 1 (micro-batch 1 of its window)" in reason


def overflow(world: lockstep.World) -> str | None:
    model = nn.Linear(1, 1, bias=False)
    stepper = lockstep.Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), clip=1.0, trace_nonfinite=True
    )
    for x in stepper.micro_batches([torch.full((1, 1), 3e38)]):
        stepper.backward((model(x) * 0.9).sum() * 1e-3 * 1e3, weight=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stepper.step().reason


def test_a_sum_that_overflows_is_told_from_gradients_that_did() -> None:
    reason = "the gradient's norm is inf. Every rank's gradients were finite before the sum"
    assert on_team(overflow, 2) == [reason] * 2
