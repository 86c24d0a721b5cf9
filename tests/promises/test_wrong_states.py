"""A wrong state never becomes permanent: what is saved was compared, and no run ends well with
replicas that differ or nothing trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lockstep
from lockstep.checkpoints import files, folders
from lockstep.errors import LockstepError, LockstepWarning, ReplicaDivergence
from lockstep.testing import run_ranks
from tests.training import toy

STEPS = 24


@dataclass
class Flip:
    """Changes one bit on rank 1 after a step: of a parameter, a buffer, or of the state that the
    optimizer keeps for a parameter.
    """

    rank: int
    after: int
    what: str
    tensor: str
    bit: int = 20
    model: nn.Module = field(init=False)
    optimizer: Optimizer = field(init=False)

    def model_of(self) -> nn.Module:
        self.model = toy.Net()
        return self.model

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return self.optimizer

    def on_step(self, record: dict[str, Any]) -> None:
        if self.rank == 1 and record["step"] == self.after:
            named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            tensor = (
                named[self.tensor]
                if self.what == "model"
                else self.optimizer.state[named[self.tensor]][self.what]
            )
            tensor.data.view(-1).view(torch.int32)[0] ^= 1 << self.bit

    def task(self) -> lockstep.Task:
        return toy.task(
            model=self.model_of,
            optimizer=self.optimizer_of,
            on_step=self.on_step,
            callbacks_on="all",
            epochs=STEPS // 4,
        )


NEVER = 10**6


def trained(
    world: lockstep.World, run: str | None, flip: tuple[int, str, str], options: dict[str, Any]
) -> tuple[str, ...]:
    """("ok", sha256), or what differs and what the error says."""
    try:
        result = lockstep.train(Flip(world.rank, *flip).task(), run=run, world=world, **options)
    except ReplicaDivergence as error:
        return error.parameter, str(error)
    return "ok", result.sha256


def test_a_corrupted_state_is_not_saved_and_the_same_command_ends_with_the_undisturbed_bits(
    tmp_path: Path,
) -> None:
    options = {"exact": True, "checkpoint_every": 5}
    (_, undisturbed), _ = run_ranks(
        trained, 2, (None, (NEVER, "model", "last.bias"), {"exact": True})
    )
    for parameter, message in run_ranks(
        trained, 2, (str(tmp_path / "run"), (12, "exp_avg", "last.weight"), options)
    ):
        assert parameter in ("last.weight", "exp_avg/last.weight")
        assert "step 10" in message
    assert [
        folders.step_of(each) for each in folders.written(tmp_path / "run" / "checkpoints")
    ] == [5, 10]
    assert not (tmp_path / "run" / "result.json").exists()
    again = run_ranks(trained, 2, (str(tmp_path / "run"), (NEVER, "model", "last.bias"), options))
    assert again == [("ok", undisturbed)] * 2


@pytest.mark.parametrize(
    ("what", "tensor", "named"),
    [
        ("model", "first.weight", "first.weight"),
        ("model", "norm.running_mean", "norm.running_mean"),
        ("exp_avg_sq", "norm.weight", "exp_avg_sq/norm.weight"),
    ],
)
def test_a_flip_after_the_last_regular_comparison_is_found_before_the_end(
    what: str, tensor: str, named: str
) -> None:
    """Without a run directory and without evaluations, in a run of fewer than 100 steps: in its
    last step.
    """
    for parameter, message in run_ranks(trained, 2, (None, (STEPS - 1, what, tensor), {})):
        assert parameter in (named, tensor)
        assert f"step {STEPS}" in message
    assert all(
        parameter == named
        for parameter, _ in run_ranks(trained, 2, (None, (STEPS, what, tensor), {}))
    )  # after the last step, before the last evaluation


def test_a_checkpoint_says_after_which_step_replicas_were_compared(tmp_path: Path) -> None:
    run_ranks(
        trained, 2, (str(tmp_path), (NEVER, "model", ""), {"checkpoint_every": 7, "steps": 15})
    )
    found = [files.read(each) for each in folders.written(tmp_path / "checkpoints")]
    assert [(each.step, each.compared) for each in found] == [(14, 14), (15, 15)]


def local(world: lockstep.World, folder: str) -> tuple[str, int, list[int]]:
    """Replicas that synchronize every 4 steps, and are saved every 3; rank 1's outer momentum
    changes after a comparison.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    stepper = lockstep.Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        sync_every=4,
        outer="nesterov",
        world=world,
    )
    checkpoints = lockstep.Checkpoints(folder, stepper, every=3, keep=2)
    parameter = ""
    try:
        for number in range(12):
            if number == 9 and world.rank == 1:
                (momentum,) = [
                    tensor
                    for name, tensor in stepper.update.replicated()
                    if name.endswith("weight")
                ]
                momentum[0, 0] += 1
            for x in stepper.micro_batches(
                [
                    torch.randn(
                        4, 3, generator=torch.Generator().manual_seed(10 * number + world.rank)
                    )
                ]
            ):
                stepper.backward(model(x).square().sum(), weight=4)
            stepper.step()
            checkpoints.step()
        stepper.check_replicas()
    except ReplicaDivergence as error:
        parameter = error.parameter
    resumed = lockstep.Checkpoints(folder, stepper, every=3)
    world.barrier()
    found = resumed.resume()
    assert found is not None
    assert found.compared is not None
    return (
        parameter,
        found.compared,
        [folders.step_of(each) for each in folders.written(Path(folder))],
    )


def test_what_was_saved_between_synchronizations_is_set_aside_when_these_find_a_difference(
    tmp_path: Path,
) -> None:
    """Compared at 4 and 8; saved at 3, 6 and 9. Step 10 begins with another momentum on rank 1,
    and 12 is the next synchronization.
    """
    for parameter, compared, left in run_ranks(local, 2, (str(tmp_path),)):
        assert parameter
        assert (compared, left) == (4, [6])
    assert [each.name for each in tmp_path.glob("set-aside-*")] == ["set-aside-step-0000009"]


def nan(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum() * torch.nan, len(batch[0])


def nothing(world: lockstep.World, run: str) -> str:
    with pytest.warns(LockstepWarning) if world.rank == 0 else pytest.raises(LockstepError):
        try:
            lockstep.train(
                toy.task(loss=nan, eval_data=None, metrics=None, best=None, best_mode=None),
                run=run,
                world=world,
            )
        except LockstepError as error:
            if world.rank:
                raise
            return str(error)
    return ""


def test_a_training_in_which_no_step_was_applied_ends_with_an_error(tmp_path: Path) -> None:
    first, _ = run_ranks(nothing, 2, (str(tmp_path),))
    assert first == str(LockstepError("no-step-applied", steps=8))
    assert not (tmp_path / "result.json").exists()
    kinds = [
        json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert kinds.count("step") == 8
