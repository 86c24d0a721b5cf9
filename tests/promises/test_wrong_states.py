"""A wrong state never becomes permanent: what is saved was compared, and no run ends well with
replicas that differ or nothing trained.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoints import files, folders
from lockstep.errors import LockstepError, LockstepWarning, ReplicaDivergence, WorkerFailed
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

STEPS = 24


NEVER = 10**6


@dataclass(frozen=True)
class Flip:
    """Changes one bit on rank 1 after a step: of a parameter, a buffer, or of the state that the
    optimizer keeps for a parameter.
    """

    after: int = NEVER
    state: str = "model"
    tensor: str = "last.bias"

    def task(self, rank: int) -> lockstep.Task:
        model = toy.Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def on_step(record: dict[str, Any]) -> None:
            if rank == 1 and record["step"] == self.after:
                named = dict(model.named_parameters()) | dict(model.named_buffers())
                tensor = named[self.tensor]
                if self.state != "model":
                    tensor = optimizer.state[tensor][self.state]
                tensor.data.view(-1).view(torch.int32)[0] ^= 1 << 20

        return toy.task(
            model=lambda: model,
            optimizer=lambda model: optimizer,
            on_step=on_step,
            callbacks_on="all",
            epochs=STEPS // 4,
        )


def training(
    world: lockstep.World, run: Path | None, flip: Flip, options: dict[str, Any]
) -> tuple[str, str]:
    """("ok", sha256)."""
    torch.manual_seed(0)
    result = lockstep.train(flip.task(world.rank), run=run, world=world, **options)
    return "ok", result.sha256


def trained(
    world: lockstep.World, run: Path | None, flip: Flip, options: dict[str, Any]
) -> tuple[str, str]:
    """The same, or what differs and what the error says."""
    try:
        return training(world, run, flip, options)
    except ReplicaDivergence as error:
        return error.parameter, str(error)


def saved_steps(folder: Path) -> list[int]:
    return [folders.step_of(path) for path in folders.written(folder)]


def test_a_corrupted_state_is_not_saved_and_the_same_command_ends_with_the_undisturbed_bits(
    tmp_path: Path,
) -> None:
    run, options = tmp_path / "run", {"exact": True, "checkpoint_every": 5}
    undisturbed = on_team(trained, 2, (None, Flip(), {"exact": True}))
    flip = Flip(12, "exp_avg", "last.weight")
    # its ranks end with it: a training that fails leaves the thread that saves
    with pytest.raises(WorkerFailed, match=r"'(exp_avg/)?last\.weight' differs.* step 10,"):
        run_ranks(training, 2, (run, flip, options))
    assert saved_steps(run / "checkpoints") == [5, 10]
    assert not (run / "result.json").exists()
    again = on_team(trained, 2, (run, Flip(), options))
    assert again == undisturbed
    assert {outcome for outcome, _ in again} == {"ok"}


@pytest.mark.parametrize(
    ("state", "tensor", "named"),
    [
        ("model", "first.weight", "first.weight"),
        ("model", "norm.running_mean", "norm.running_mean"),
        ("exp_avg_sq", "norm.weight", "exp_avg_sq/norm.weight"),
    ],
)
def test_a_flip_after_the_last_regular_comparison_is_noticed_before_the_end(
    state: str, tensor: str, named: str
) -> None:
    """Without a run directory and without evaluations, in a run of fewer than 100 steps: in its
    last step.
    """
    for parameter, message in on_team(trained, 2, (None, Flip(STEPS - 1, state, tensor), {})):
        assert parameter in (named, tensor)
        assert f"step {STEPS}" in message
    # after the last step, before the last evaluation
    for parameter, _ in on_team(trained, 2, (None, Flip(STEPS, state, tensor), {})):
        assert parameter == named


def test_a_checkpoint_says_after_which_step_replicas_were_compared(tmp_path: Path) -> None:
    on_team(trained, 2, (tmp_path, Flip(), {"checkpoint_every": 7, "steps": 15}))
    checkpoints = [files.read(path) for path in folders.written(tmp_path / "checkpoints")]
    assert [(each.step, each.compared) for each in checkpoints] == [(7, 7), (14, 14), (15, 15)]


def local(world: lockstep.World, folder: Path) -> tuple[str, int | None, list[int]]:
    """Replicas that synchronize every 4 steps, and are saved every 3; rank 1's outer momentum
    changes after a comparison. Return what differs, when the checkpoint that is resumed was
    compared, and the steps that are left.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    parameter = ""
    stepper = lockstep.Stepper(model, sgd, sync_every=4, outer="nesterov", world=world)
    checkpoints = lockstep.Checkpoints(folder, stepper, every=3, keep=2)
    try:
        for number in range(12):
            if number == 9 and world.rank == 1:
                replicated = dict(stepper.update.replicated())
                (momentum,) = (
                    tensor for name, tensor in replicated.items() if name.endswith("weight")
                )
                momentum[0, 0] += 1
            generator = torch.Generator().manual_seed(10 * number + world.rank)
            for x in stepper.micro_batches([torch.randn(4, 3, generator=generator)]):
                stepper.backward(model(x).square().sum(), weight=4)
            stepper.step()
            checkpoints.step()
        stepper.check_replicas()
    except ReplicaDivergence as error:
        parameter = error.parameter
    resumed = lockstep.Checkpoints(folder, stepper, every=3)
    world.barrier()
    progress = resumed.resume()
    assert progress is not None
    return parameter, progress.compared, saved_steps(folder)


def test_what_was_saved_between_synchronizations_is_set_aside_when_these_find_a_difference(
    tmp_path: Path,
) -> None:
    """Compared at 4 and 8; saved at 3, 6 and 9. Step 10 begins with another momentum on rank 1,
    and 12 is the next synchronization.
    """
    for parameter, compared, left in run_ranks(local, 2, (tmp_path,)):
        assert parameter
        assert (compared, left) == (4, [6])
    assert [path.name for path in tmp_path.glob("set-aside-*")] == ["set-aside-step-0000009"]


def nan(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return output.sum() * torch.nan, len(batch[0])


def nothing(world: lockstep.World, run: Path) -> str:
    task = toy.task(loss=nan, eval_data=None, metrics=None, best=None, best_mode=None)
    with warnings.catch_warnings(action="ignore", category=LockstepWarning):
        with refused("no-step-applied", LockstepError, steps=8) as caught:
            lockstep.train(task, run=run, world=world)
        return caught.value.code


def test_a_training_in_which_no_step_was_applied_ends_with_an_error(tmp_path: Path) -> None:
    assert on_team(nothing, 2, (tmp_path,)) == ["no-step-applied"] * 2
    assert not (tmp_path / "result.json").exists()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("step") == 8
