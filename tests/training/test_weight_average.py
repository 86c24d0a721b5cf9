"""The average of a task's weights (EMA, SWA): when it moves, that it is evaluated, compared, kept
and resumed; and what it does not go with.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep
from lockstep import World
from lockstep.checks.identity import sha256, weights
from lockstep.cli.checkpoints import app
from lockstep.errors import ReplicaDivergence, TaskError
from lockstep.training.inference.apply import InferenceJob, apply
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

FILE = """
from tests.training import test_weight_average, toy

def task():
    return toy.task(average=test_weight_average.ema)
"""


def ema(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)


def swa(model: nn.Module) -> AveragedModel:
    return AveragedModel(model)


SWA: dict[str, Any] = {"average": swa, "average_per": "epoch", "average_after": 1, "epochs": 4}


def export(run: Path, out: Path, *options: str) -> None:
    app(["export", str(run), "--out", str(out), *options], standalone_mode=False)


def by_hand(changes: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """The loop that a user would write: the average's SHA-256, and what an evaluation finds."""
    averages: list[AveragedModel] = []

    def update(model: nn.Module, epoch: int = 1) -> None:
        if epoch < changes.get("average_after", 0):
            return
        if not averages:
            averages.append(changes["average"](model))
        averages[0].update_parameters(model)

    when: dict[str, Any] = {f"after_{changes.get('average_per', 'step')}": update}
    with lockstep.init(backend="gloo") as world:
        toy.by_hand(changes.get("epochs", 2), exact=True, **when)
        (average,) = averages
        data = toy.data(toy.HELD_OUT, 2)
        metrics = lockstep.evaluate(average.module, data, toy.metrics, batch=4, world=world)
    return sha256(weights(average.module)), metrics


def test_it_is_updated_and_evaluated_as_in_a_loop_by_hand() -> None:
    for changes in ({"average": ema}, SWA):
        result = lockstep.train(toy.task(**changes), exact=True)
        digest, metrics = by_hand(changes)
        assert result.average is not None
        assert result.average_sha256 == digest == sha256(weights(result.average))
        assert result.average_sha256 != result.sha256
        assert result.metrics["accuracy"] == metrics["accuracy"]
    plain = lockstep.train(toy.task(), exact=True)
    assert (plain.average, plain.average_sha256) == (None, None)


def test_before_its_first_update_the_model_itself_is_evaluated(tmp_path: Path) -> None:
    late = lockstep.train(
        toy.task(average=ema, average_after=99), exact=True, run=tmp_path / "late"
    )
    plain = lockstep.train(toy.task(), exact=True)
    assert (late.metrics, late.sha256) == (plain.metrics, plain.sha256)
    assert late.average is None
    with refused("no-average-in-checkpoint"):
        export(tmp_path / "late", tmp_path / "a.pt", "--average")


def trained(
    world: World, folder: str, failing: int | None, changes: dict[str, Any], **options: Any
) -> Any:
    """The result. `failing`: the step in which all ranks fail."""

    def on_step(record: Any) -> None:
        if record["step"] == failing:
            raise ZeroDivisionError

    task = toy.task(on_step=on_step, callbacks_on="all", **changes)
    result = lockstep.train(
        task, run=folder, exact=True, checkpoint_every=3, world=world, **options
    )
    return result.average_sha256, result.metrics, result.sha256


@pytest.mark.parametrize(
    ("changes", "failing"),
    [({"average": ema}, 5), pytest.param(SWA, 14, marks=pytest.mark.rest)],
    ids=["ema", "swa"],
)
def test_a_training_that_failed_resumes_with_its_average_at_another_size(
    changes: dict[str, Any], failing: int, tmp_path: Path
) -> None:
    whole, other = tmp_path / "whole", tmp_path / "failed"
    expected = toy.alone(trained, str(whole), None, changes, update="sharded")
    with pytest.raises(ZeroDivisionError):
        toy.alone(trained, str(other), failing, changes)
    with refused("another-training"):
        toy.alone(trained, str(other), None, {**changes, "average_after": 3})
    assert on_team(trained, 3, [str(other), None, changes]) == [expected] * 3
    last = max((other / "checkpoints").glob("step-*"))
    assert sha256(load_file(last / "average.safetensors")) == expected[0]
    assert (last / "average.safetensors").read_bytes() == (
        whole / "checkpoints" / last.name / "average.safetensors"
    ).read_bytes()


def test_evaluate_and_export_take_the_average_of_a_checkpoint(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "averaged.py"
    file.write_text(FILE)
    result = lockstep.train(toy.task(average=ema), run=run, exact=True)
    job = InferenceJob(
        command="evaluate",
        task=str(file),
        checkpoint=str(result.checkpoint),
        answer=str(tmp_path / "answer"),
    )
    apply(job)
    answer = json.loads((tmp_path / "answer").read_text())
    assert (answer["metrics"], answer["averaged"]) == (result.metrics, True)
    for name, model in (("a.safetensors", result.average), ("m.safetensors", result.model)):
        export(run, tmp_path / name, *(["--average"] if model is result.average else []))
        assert model is not None
        model.load_state_dict(load_file(tmp_path / name))
        expected = result.average_sha256 if model is result.average else result.sha256
        assert sha256(load_file(tmp_path / name)) == sha256(weights(model)) == expected
    export(run, tmp_path / "a.pt", "--average")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert sha256(loaded) == result.average_sha256


def stepper_of(average: bool, **method: Any) -> lockstep.Stepper:
    model = toy.Net()
    return lockstep.Stepper(
        model, toy.sgd(model), average=ema(model) if average else None, **method
    )


def compared_and_kept(world: World, folder: str) -> str:
    """An average in a Stepper of one's own."""
    for method in ({"sync_every": 2}, {"update": "server"}):
        with refused("average-does-not-fit"):
            stepper_of(True, **method)
    with refused("average-does-not-fit", option="mesh='pipeline=2'"):
        lockstep.train(toy.task(average=ema), mesh="pipeline=2", world=world)
    saving = stepper_of(True)
    assert saving.average is not None
    saving.average.update_parameters(saving.model)
    without = stepper_of(False)
    for name, stepper in (("averaged", saving), ("plain", without)):
        with closing(lockstep.Checkpoints(f"{folder}/{name}", stepper)) as checkpoints:
            checkpoints.save()
    for saved, stepper in (("averaged", without), ("plain", stepper_of(True))):
        with refused("another-training"):
            lockstep.Checkpoints(f"{folder}/{saved}", stepper).resume()
    last = saving.average.module.last
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight[0, 0] += world.rank
    with pytest.raises(ReplicaDivergence) as caught:
        saving.check_replicas()
    return str(caught.value.values["parameter"])


def test_it_is_compared_and_kept_and_does_not_go_with_everything(tmp_path: Path) -> None:
    assert on_team(compared_and_kept, 2, [str(tmp_path)]) == ["average of last.weight"] * 2


def test_what_is_no_average() -> None:
    with refused("no-average", TaskError, average_per="epoch", average_after=0):
        toy.task(average_per="epoch")
    with refused("unknown-choice", TaskError):
        toy.task(average=ema, average_per="week")
    with refused("wrong-value", TaskError):
        toy.task(average=ema, average_after=-1)
    with refused("wrong-return-type", TaskError, function="Task: average"):
        lockstep.train(toy.task(average=lambda model: model))
