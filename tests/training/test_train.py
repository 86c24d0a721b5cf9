"""The loop, end to end: the same training on any number of ranks, and everything that is
recorded of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import IterableDataset

import lockstep
from lockstep import World
from lockstep.checkpoints import files
from lockstep.checks.identity import sha256, weights
from lockstep.config.settings import Settings
from lockstep.config.task import EarlyStopping, Precision
from lockstep.data.orders import Weighted
from lockstep.errors import LockstepError, LockstepWarning, PeerFailed, TaskError, UsageError
from lockstep.training.loop import Training
from lockstep.training.result import Result
from lockstep.training.train import train
from tests import zoo
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy


@pytest.fixture(scope="module")
def alone() -> Result:
    """The task trained by one process."""
    return train(toy.task())


def test_it_is_the_loop_that_a_user_would_write(alone: Result) -> None:
    with lockstep.init(backend="gloo"):
        by_hand = toy.by_hand()
    assert alone.sha256 == sha256(weights(by_hand)) == sha256(weights(alone.model))
    assert (alone.task, alone.epochs, alone.steps, alone.workers) == ("toy", 2, 8, 1)
    assert (alone.update, alone.reduce) == ("replicated", "native")
    assert (alone.run, alone.checkpoint) == (None, None)
    assert alone.headline == ("accuracy", alone.metrics["accuracy"])
    assert set(alone.metrics) == {"accuracy", "loss"}


def built(world: World) -> list[Tensor]:
    """The parameters of a training that changes none."""
    task = toy.task(
        init_seed=3, epochs=1, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0)
    )
    return [parameter.detach() for parameter in train(task).model.parameters()]


def test_init_seed_gives_the_weights_of_the_old_script() -> None:
    old_script = list(toy.net().parameters())
    for size in (1, 2):
        for parameters in on_team(built, size):
            assert all(map(torch.equal, parameters, old_script))


def on_rank(
    world: World, options: dict[str, Any]
) -> tuple[dict[str, float], dict[str, Tensor], str, list[Any]]:
    steps: list[Any] = []
    result = train(toy.task(on_step=steps.append), **options)
    assert World.current() is world  # the caller's world stays open
    return result.metrics, weights(result.model), result.sha256, steps


KNOBS = {"bucket_mb": 0.0005, "threads": 2, "loader_workers": 1}


def test_neither_the_number_of_ranks_nor_how_they_work_changes_what_is_learned(
    alone: Result,
) -> None:
    for shares, options in (
        ([8, 3], {"reduce": "native", "update": "sharded", **KNOBS}),
        ([4, 4, 3, 0], {"reduce": "native"}),
    ):
        ranks = on_team(on_rank, len(shares), (options,))
        assert len({digest for _, _, digest, _ in ranks}) == 1
        for metrics, learned, *_ in ranks:
            assert metrics == ranks[0][0]
            assert learned.keys() == weights(alone.model).keys()
            for name, tensor in weights(alone.model).items():
                assert torch.allclose(learned[name], tensor, rtol=1e-4, atol=1e-6), name
        steps = ranks[0][3]
        assert [step["weight"] for step in steps] == [11.0] * 8
        assert all(step["samples_by_rank"] == shares for step in steps)
        assert all(step["bytes_sent"] > 0 for step in steps)


def test_keyword_inputs_train_alike_and_clipped_steps_tell_their_norm(tmp_path: Path) -> None:
    plain = train(toy.task(clip=0.05), run=tmp_path / "tuple", epochs=1)
    keywords = train(
        toy.task(clip=0.05, inputs=lambda batch: {"x": batch[0]}), run=tmp_path / "dict", epochs=1
    )
    assert plain.sha256 == keywords.sha256
    norms = [step["grad_norm"] for step in toy.records(tmp_path / "dict", "step")]
    assert len(norms) == 4
    assert all(norm > 0.05 for norm in norms)  # before it was clipped


def test_what_a_run_directory_holds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(toy.task(best="accuracy", best_mode="max"), run=run, epochs=3)
    assert result.run == run
    starts = toy.records(run, "event")
    assert starts[0]["line"].startswith("global batch 11 = 3 micro-batches x 4")
    assert [event["event"] for event in starts] == ["start", "end"]
    steps = toy.records(run, "step")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert [step["epoch"] for step in steps] == [1] * 4 + [2] * 4 + [3] * 4
    keys = "kind step epoch loss weight samples_by_rank lr samples_per_s bytes_sent"
    assert set(steps[0]) == set(keys.split())
    evaluations = toy.records(run, "evaluate")
    assert [(found["step"], found["epoch"]) for found in evaluations] == [(4, 1), (8, 2), (12, 3)]
    assert evaluations[-1]["metrics"] == result.metrics
    written = json.loads((run / "result.json").read_text())
    assert written == result.as_json()
    assert written["checkpoint"] == "checkpoints/step-0000012"
    checkpoint = files.read(run / written["checkpoint"])
    assert sha256(checkpoint.tensors) == result.sha256 == checkpoint.state["sha256"]
    best = max(evaluations, key=lambda found: found["metrics"]["accuracy"])
    value = best["metrics"]["accuracy"]
    assert result.best == {"metric": "accuracy", "value": value, "step": best["step"]}
    assert files.best(run / "checkpoints") == run / "checkpoints" / f"step-{best['step']:07d}"
    assert json.loads((run / "settings.json").read_text())["epochs"] == 3
    with refused("run-finished", path=str(run)):
        train(toy.task(), run=run)


def test_steps_may_end_inside_an_epoch_and_stderr_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, epochs, evaluated in ((3, 0, [3]), (4, 1, [4]), (6, 1, [4, 6])):
        run = tmp_path / str(steps)
        result = train(toy.task(), steps=steps, run=run)
        assert (result.steps, result.epochs) == (steps, epochs)
        assert [record["step"] for record in toy.records(run, "evaluate")] == evaluated
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"run directory: {run}\n")
        assert re.findall(r", step (\d+): accuracy 0\.", err) == [str(step) for step in evaluated]
    without = train(toy.task(eval_data=None, metrics=None), steps=2)
    assert (without.metrics, without.headline) == ({}, ("loss", without.loss))


def halving(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / steps)


def test_the_scheduler_knows_how_often_it_is_stepped(tmp_path: Path) -> None:
    for per, rates in (
        ("step", [0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125]),
        ("epoch", [0.1] * 4 + [0.05] * 4),
    ):
        train(toy.task(scheduler=halving, scheduler_per=per), run=tmp_path / per)
        steps = toy.records(tmp_path / per, "step")
        assert [step["lr"] for step in steps] == pytest.approx(rates)


def stopping(world: World, where: str) -> tuple[Any, list[int], list[int]]:
    steps: list[int] = []
    evaluations: list[int] = []
    task = toy.task(
        epochs=9,
        metrics=lambda output, batch: {"constant": (1.0, 1)},
        early_stopping=EarlyStopping(metric="constant", mode="max", patience=2),
        on_step=lambda record: steps.append(record["step"]),
        on_evaluate=lambda record: evaluations.append(record["step"]),
        callbacks_on=where,
    )
    result = train(task)
    return (result.epochs, result.steps, result.stopped_early), steps, evaluations


def test_all_ranks_stop_early_together_and_callbacks_are_on_the_first_or_on_all() -> None:
    stop = 3, 12, "constant has not improved on 1.0000 (step 4) for 2 evaluations"
    called = stop, [*range(1, 13)], [4, 8, 12]
    assert on_team(stopping, 2, ["first"]) == [called, (stop, [], [])]
    assert on_team(stopping, 2, ["all"]) == [called, called]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_other_precisions_train_and_leave_float32_weights(
    alone: Result, precision: Precision
) -> None:
    other = train(toy.task(), precision=precision)
    # fp16 may skip a step
    assert other.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=0.25)
    dtypes = {tensor.dtype for tensor in weights(other.model).values()}
    assert dtypes == {torch.float32, torch.int64}
    if precision != "tf32":  # which most CPUs cannot do
        assert other.sha256 != alone.sha256
    assert train(toy.task(precision=precision)).sha256 == other.sha256


def test_compile_keeps_the_names_and_exact_mode_fixes_the_shapes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In exact mode no kernel depends on shapes met before."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[tuple[torch.nn.Module, bool | None]] = []

    def note(call: Any, dynamic: bool | None, **_: Any) -> Any:
        compiled.append((call.__self__, dynamic))
        return call

    monkeypatch.setattr(torch, "compile", note)
    result = train(toy.task(), compile=True, steps=1, run=tmp_path / "run")
    assert compiled == [(result.model, None)]
    assert result.checkpoint is not None
    assert set(files.read(result.checkpoint).tensors) == set(toy.Net().state_dict())
    train(toy.task(compile=True), compile=False, steps=1)
    assert len(compiled) == 1
    exact = train(toy.task(compile=True), steps=1, exact=True)
    assert compiled[1:] == [(exact.model, False)]


def test_a_skipped_step_is_said_once_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain: dict[str, Any] = {"metrics": None, "eval_data": None}
    weightless = toy.task(loss=lambda output, batch: (output.sum() * 0, 0), **plain)
    said = pytest.warns(LockstepWarning, match="step 1 was skipped: every rank's weight is 0")
    with said, refused("no-step-applied", LockstepError, steps=1):
        train(weightless, steps=1, run=tmp_path / "weightless")
    assert "was skipped" not in capsys.readouterr().err
    overflowing = toy.task(
        loss=lambda output, batch: (output.sum() * 1e30, len(output)), precision="fp16", **plain
    )
    with refused("no-step-applied", LockstepError, steps=1):
        train(overflowing, steps=1, run=tmp_path / "overflowing")
    assert "step 1 was skipped: gradients overflowed at loss scale 65536" in capsys.readouterr().err
    for run in ("weightless", "overflowing"):
        skipped = toy.records(tmp_path / run, "event")[1]
        assert (skipped["event"], skipped["step"]) == ("step skipped", 1)
    assert toy.records(tmp_path / "weightless", "step")[0]["loss"] == "nan"


def one_step(**changes: Any) -> None:
    train(toy.task(**changes), steps=1)


def test_what_the_tasks_functions_return_is_checked() -> None:
    for name, function, kind in (
        ("model", lambda: 3, "int"),
        ("optimizer", lambda model: None, "NoneType"),
        ("scheduler", lambda optimizer, steps: None, "NoneType"),
        ("loss", lambda output, batch: output.sum(), "Tensor"),
    ):
        with refused("wrong-return-type", TaskError, type=kind) as refusal:
            one_step(**{name: function})
        assert f"{name} returned a {kind}" in str(refusal.value)
    with refused("wrong-return-type", TaskError) as refusal:
        one_step(scheduler=lambda optimizer, steps: ReduceLROnPlateau(optimizer))
    assert "ReduceLROnPlateau" in str(refusal.value)
    assert "without a metric" in str(refusal.value)
    with refused("several-optimizers", TaskError, type="list"):
        one_step(optimizer=lambda model: [toy.sgd(model), toy.sgd(model)])
    with refused("metric-not-measured", TaskError, metric="f1", measured=["accuracy", "loss"]):
        one_step(best="f1", best_mode="max")


def test_parameters_that_nothing_uses_may_be_meant() -> None:
    with pytest.raises(LockstepError, match=r"'unused.weight', 'unused.bias' got no gradient on"):
        one_step(model=zoo.Awkward)
    for unused in ("zeros", "skip"):
        one_step(model=zoo.Awkward, unused=unused)


def test_only_a_task_is_trained_and_only_with_options_that_can_work() -> None:
    model = toy.Net()
    with lockstep.init(backend="gloo"):
        server = lockstep.Stepper(model, toy.sgd(model), update="server")
        loader = lockstep.Loader(toy.data(12, 1), global_batch=6, micro_batch=2, balance="1")
        with refused("balance-with-server", balance="1", update="server"):
            server.draws(loader)
    with refused("epochs-and-steps", epochs=1, steps=1):
        train(toy.task(), epochs=1, steps=1)
    with refused("wrong-value", name="epochs", value=0):
        train(toy.task(), epochs=0)
    with refused("not-a-task", TaskError, type="Net"):
        train(toy.Net())  # type: ignore[arg-type]
    with (
        lockstep.init(backend="gloo"),
        refused("device-of-the-open-world", device="cuda", open="cpu"),
    ):
        train(toy.task(), device="cuda")


def in_use(world: World, run: str) -> str:
    error = UsageError if world.rank == 0 else PeerFailed
    with pytest.raises(error) as caught:
        train(toy.task(), run=run)
    return str(caught.value)


def test_all_ranks_hear_that_the_run_directory_is_refused(tmp_path: Path) -> None:
    for file in ("lock", "result.json"):
        (tmp_path / file).touch()
    first, second = on_team(in_use, 2, [str(tmp_path)])
    assert first.endswith(" [run-finished]")
    assert second.startswith(f"rank 0 could not use the run directory {tmp_path}")
    assert second.endswith(" [rank-0-failed]")


def counted(world: World, asked: int | None) -> tuple[set[int], int, int]:
    """The intra-op threads that the loss saw, those before, and those after."""
    seen: set[int] = set()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        seen.add(torch.get_num_threads())
        return toy.loss(output, batch)

    before = torch.get_num_threads()
    train(toy.task(loss=loss), threads=asked, steps=2)
    return seen, before, torch.get_num_threads()


def test_threads_are_those_asked_for_and_the_old_ones_come_back() -> None:
    for asked, threads in ((None, 1), (3, 3)):
        assert on_team(counted, 2, (asked,)) == [({threads}, 1, 1)] * 2


def test_the_knobs_reach_what_they_turn() -> None:
    settings = Settings(task="toy", bucket_mb=0.0005, update="sharded", loader_workers=2)
    with lockstep.init(backend="gloo") as world:
        training = Training(toy.task(), settings, world, None)
    assert training.stepper.reducer.bucket_bytes == 524
    assert len(training.stepper.reducer.buckets) > 1
    assert training.stepper.update.name == "sharded"
    assert training.loader._loader.num_workers == 2


class Streamed(IterableDataset[Any]):
    """Some of the toy's samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(toy.data(20, 0)))


def streamed(world: World, **options: Any) -> tuple[int, int, list[Tensor]]:
    task = toy.task(
        train_data=Streamed(), global_batch=8, micro_batch=4, eval_data=None, metrics=None
    )
    result = train(task, **options)
    parameters = [parameter.detach() for parameter in result.model.parameters()]
    return result.steps, result.epochs, parameters


def test_a_stream_trains_alike_on_any_number_of_ranks() -> None:
    for options, steps, epochs in (({"epochs": 2}, 6, 2), ({"steps": 4}, 4, 1)):
        alone = toy.alone(streamed, **options)
        assert alone[:2] == (steps, epochs)
        for rank in on_team(streamed, 3, kwargs=options):
            assert rank[:2] == alone[:2]
            for ours, expected in zip(rank[2], alone[2], strict=True):
                assert torch.allclose(ours, expected, atol=1e-6)


def test_a_schedule_over_a_stream_needs_to_know_its_length() -> None:
    task = toy.task(
        train_data=Streamed(),
        global_batch=8,
        micro_batch=4,
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.LinearLR(
            optimizer, total_iters=steps
        ),
    )
    with refused("schedule-length-unknown", TaskError, per="step", fix="give --steps"):
        train(task)
    assert train(task, steps=2).steps == 2


def test_an_order_of_the_task_is_used() -> None:
    seen: list[int] = []

    def order(data: Any) -> Any:
        seen.append(len(data))
        return Weighted([1.0] + [0.0] * (len(data) - 1), seed=0)

    one = train(toy.task(order=order), steps=1)
    assert seen == [len(toy.task().train_data)]  # type: ignore[arg-type]
    assert one.loss != train(toy.task(), steps=1).loss


def unequal(world: World, run: str | None, balance: str | None) -> str:
    return train(toy.task(epochs=3), exact=True, run=run, balance=balance).sha256


def test_a_run_records_its_shares_and_its_bits_do_not_depend_on_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    digests = on_team(unequal, 2, (str(run), "1,2"))
    assert {*digests} == {toy.alone(unequal, None, None)}
    start, *_ = toy.records(run, "event")
    split = "global batch 11 = 3 micro-batches x 4, the last 3; 2 ranks: 1, 2; "
    assert start["line"].startswith(split)
    assert [step["samples_by_rank"] for step in toy.records(run, "step")] == [[4, 7]] * 12
