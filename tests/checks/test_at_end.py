"""No program ends well with replicas that differ, and none is stopped because it moves weights on
purpose between two steps.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.launcher.rank import Target
from lockstep.launcher.supervise import supervise
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests import zoo
from tests.teams import on_team


def own_loop(world: World, update: str, after: str) -> None:
    """Three steps of a Stepper. In the third, which no regular comparison follows, ranks get their
    own learning rates; or afterwards rank 0 changes its weights to evaluate them.
    """
    model = zoo.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = lockstep.Stepper(model, optimizer, update=update, world=world)
    world.stepper = stepper  # type: ignore[attr-defined]  # a script's variables live until its end
    for step in range(3):
        if step == 2 and after == "own learning rates":
            for group in optimizer.param_groups:
                group["lr"] = 0.1 + 0.1 * world.rank
        for x, y in stepper.micro_batches([zoo.batch(world.rank)]):
            stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
        stepper.step()
    if after == "an evaluation of other weights" and world.rank == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_learning_rates_that_differ_after_the_last_comparison_are_an_error(update: str) -> None:
    with pytest.raises(WorkerFailed, match="replicas-differ-at-end"):
        run_ranks(own_loop, 2, (update, "own learning rates"))


def test_weights_that_a_rank_changes_after_the_last_step_are_its_own_affair() -> None:
    run_ranks(own_loop, 2, ("replicated", "an evaluation of other weights"))


SCRIPT = """
import sys, torch, torch.distributed as dist, lockstep
from tests import zoo

dist.init_process_group("gloo")
rank = dist.get_rank()
model = lockstep.DistributedDataParallel(zoo.build("mlp"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 3 and sys.argv[1] == "differs":
        optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * rank
    optimizer.zero_grad()
    x, y = zoo.batch(rank)
    zoo.loss_sum(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("what", "code"), [("differs", 1), ("equal", 0)])
def test_a_plain_script_with_the_wrapper_does_not_end_well_if_its_replicas_differ(
    what: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    target = Target(script=str(tmp_path / "script.py"), args=[what])
    assert supervise(target, 2).exit_code == code


def sharpness_aware(world: World, exact: bool) -> list[str]:
    """Sharpness-aware minimization: the second backward of a step is at other weights on each rank.
    Returns the warnings.
    """
    model = lockstep.DistributedDataParallel(zoo.build("mlp"), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LockstepWarning)
        for step in range(4):
            x, y = zoo.batch(2 * step + world.rank)
            with model.no_sync():
                zoo.loss_sum(model(x), y).backward()
            before = [parameter.detach().clone() for parameter in parameters]
            moves = [0.3 * _gradient(parameter) for parameter in parameters]
            with torch.no_grad():
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.add_(move)
                    parameter.grad = None
            zoo.loss_sum(model(x), y).backward()
            with torch.no_grad():
                for parameter, move, old in zip(parameters, moves, before, strict=True):
                    parameter.copy_(old if exact else parameter - move)
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad / (parameter.grad.norm() + 1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_weights_that_differ_on_purpose_within_a_step_are_no_divergence(exact: bool) -> None:
    ours, others = on_team(sharpness_aware, 2, (exact,))
    assert others == []
    assert len(ours) == (0 if exact else 1), ours
    assert exact or "differ by rounding" in ours[0]
