"""The loop, end to end: the same training on any number of ranks, and everything that is
recorded of it.
"""

from __future__ import annotations

import json
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
from lockstep.checkpoints.identity import sha256, weights
from lockstep.config.settings import Settings
from lockstep.config.task import EarlyStopping, Precision
from lockstep.data.orders import Weighted
from lockstep.errors import (
    LockstepError,
    LockstepWarning,
    PeerFailed,
    TaskError,
    UsageError,
    WorkerFailed,
)
from lockstep.testing import run_ranks
from lockstep.training.loop import Training
from lockstep.training.result import last_line
from lockstep.training.train import train
from tests.refused import refused
from tests.training import toy


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        record
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == kind
    ]


def by_hand() -> torch.nn.Module:
    """What DESIGN's example writes, without training/."""
    with lockstep.init(backend="gloo"):
        lockstep.runtime.randomness.shared(0)
        model = toy.Net()
        stepper = lockstep.Stepper(model, toy.sgd(model))
        loader = lockstep.Loader(toy.data(toy.SAMPLES, 1), global_batch=11, micro_batch=4, seed=0)
        for epoch in loader.epochs(2):
            for window in epoch:
                for batch in stepper.micro_batches(window):
                    stepper.backward(*toy.loss(model(batch[0]), batch))
                stepper.step()
    return model


def test_it_is_the_loop_that_a_user_would_write() -> None:
    result = train(toy.task())
    assert result.sha256 == sha256(weights(by_hand())) == sha256(weights(result.model))
    assert (result.task, result.epochs, result.steps, result.workers) == ("toy", 2, 8, 1)
    assert (result.update, result.reduce, result.run, result.checkpoint) == (
        "replicated",
        "native",
        None,
        None,
    )
    assert result.headline == ("accuracy", result.metrics["accuracy"])
    assert set(result.metrics) == {"accuracy", "loss"}


def test_what_compresses_is_named_once(tmp_path: Path) -> None:
    result = train(toy.task(), compress="int8", run=tmp_path / "run")
    assert last_line(result.as_json()).startswith(
        "toy: 2 epochs, 8 steps, 1 worker, replicated, int8 | "
    )
    assert (
        "; gradients by int8, replicated update" in (tmp_path / "run" / "metrics.jsonl").read_text()
    )


def on_rank(
    world: World, run: str | None = None, **options: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor], str]:
    result = train(toy.task(), run=run, **options)
    assert World.current() is world  # the caller's world stays open
    return result.metrics, weights(result.model), result.sha256


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("reduce", ["native", "central"])
def test_any_number_of_ranks_trains_the_same(workers: int, reduce: str, tmp_path: Path) -> None:
    ranks = run_ranks(on_rank, workers, kwargs={"run": str(tmp_path / "run"), "reduce": reduce})
    alone = train(toy.task())
    assert len({sha for _, _, sha in ranks}) == 1
    for metrics, found, _ in ranks:
        assert metrics == ranks[0][0]
        for name, tensor in weights(alone.model).items():
            assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6), name
    steps = records(tmp_path / "run", "step")
    assert [step["weight"] for step in steps] == [11.0] * 8
    shares = {2: [8, 3], 4: [4, 4, 3, 0]}[workers]
    assert all(step["samples_by_rank"] == shares for step in steps)
    assert all(step["bytes_sent"] > 0 for step in steps)


def test_keyword_inputs_train_alike_and_clipped_steps_tell_their_norm(tmp_path: Path) -> None:
    plain = train(toy.task(clip=0.05), run=tmp_path / "tuple", epochs=1)
    keywords = train(
        toy.task(clip=0.05, inputs=lambda batch: {"x": batch[0]}), run=tmp_path / "dict", epochs=1
    )
    assert plain.sha256 == keywords.sha256
    norms = [step["grad_norm"] for step in records(tmp_path / "dict", "step")]
    assert len(norms) == 4
    assert all(norm > 0.05 for norm in norms)  # before it was clipped


def test_several_optimizers_are_refused_with_what_to_do() -> None:
    with refused("several-optimizers", TaskError, type="list"):
        train(toy.task(optimizer=lambda model: [toy.sgd(model), toy.sgd(model)]))


def test_what_a_run_directory_holds(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = train(toy.task(best="accuracy", best_mode="max"), run=run, epochs=3)
    assert result.run == run
    starts = records(run, "event")
    assert starts[0]["line"].startswith("global batch 11 = 3 micro-batches x 4")
    assert [event["event"] for event in starts] == ["start", "end"]
    steps = records(run, "step")
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert [step["epoch"] for step in steps] == [1] * 4 + [2] * 4 + [3] * 4
    assert set(steps[0]) == {
        "kind",
        "step",
        "epoch",
        "loss",
        "weight",
        "samples_by_rank",
        "lr",
        "samples_per_s",
        "bytes_sent",
    }
    evaluations = records(run, "evaluate")
    assert [(found["step"], found["epoch"]) for found in evaluations] == [(4, 1), (8, 2), (12, 3)]
    assert evaluations[-1]["metrics"] == result.metrics
    written = json.loads((run / "result.json").read_text())
    assert written == result.as_json()
    assert written["checkpoint"] == "checkpoints/step-0000012"
    checkpoint = files.read(run / written["checkpoint"])
    assert sha256(checkpoint.tensors) == result.sha256 == checkpoint.state["sha256"]
    best = max(evaluations, key=lambda found: found["metrics"]["accuracy"])
    assert result.best == {
        "metric": "accuracy",
        "value": best["metrics"]["accuracy"],
        "step": best["step"],
    }
    assert files.best(run / "checkpoints") == run / "checkpoints" / f"step-{best['step']:07d}"
    assert json.loads((run / "settings.json").read_text())["epochs"] == 3
    with refused("run-finished", path=str(run)):
        train(toy.task(), run=run)


@pytest.mark.parametrize(
    ("steps", "epochs", "evaluated"), [(3, 0, [3]), (4, 1, [4]), (6, 1, [4, 6])]
)
def test_steps_may_end_inside_an_epoch(
    tmp_path: Path, steps: int, epochs: int, evaluated: list[int]
) -> None:
    result = train(toy.task(), steps=steps, run=tmp_path / "run")
    assert (result.steps, result.epochs) == (steps, epochs)
    assert [record["step"] for record in records(tmp_path / "run", "evaluate")] == evaluated


def test_without_evaluation_the_loss_is_shown() -> None:
    result = train(toy.task(eval_data=None, metrics=None), steps=2)
    assert (result.metrics, result.headline) == ({}, ("loss", result.loss))


def test_rank_0_says_how_the_batch_is_split_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    train(toy.task(), steps=4)
    out, err = capsys.readouterr()
    assert out == ""
    cut = lockstep.Loader(toy.data(toy.SAMPLES, 1), global_batch=11, micro_batch=4).describe()
    assert err.splitlines()[0] == f"{cut}; replicated update"
    assert err.splitlines()[1].startswith("epoch 1/1, step 4: accuracy 0.")


def halving(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / steps)


@pytest.mark.parametrize(
    ("per", "rates"),
    [
        ("step", [0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125]),
        ("epoch", [0.1] * 4 + [0.05] * 4),
    ],
)
def test_the_scheduler_knows_how_often_it_is_stepped(
    tmp_path: Path, per: str, rates: list[float]
) -> None:
    train(toy.task(scheduler=halving, scheduler_per=per), run=tmp_path / "run")
    assert [record["lr"] for record in records(tmp_path / "run", "step")] == pytest.approx(rates)


def stopping(world: World) -> tuple[int, int, str | None]:
    never = EarlyStopping(metric="constant", mode="max", patience=2)
    task = toy.task(
        epochs=9, metrics=lambda output, batch: {"constant": (1.0, 1)}, early_stopping=never
    )
    result = train(task)
    return result.epochs, result.steps, result.stopped_early


def test_all_ranks_stop_early_together() -> None:
    reason = "constant has not improved on 1.0000 (step 4) for 2 evaluations"
    assert run_ranks(stopping, 2) == [(3, 12, reason)] * 2


def calling(world: World, where: str) -> list[list[int]]:
    seen: list[list[int]] = [[], []]
    on_step, on_evaluate = (lambda record, into=into: into.append(record["step"]) for into in seen)
    train(toy.task(on_step=on_step, on_evaluate=on_evaluate, callbacks_on=where))
    return seen


@pytest.mark.parametrize("where", ["first", "all"])
def test_callbacks_get_the_records(where: str) -> None:
    called = [list(range(1, 9)), [4, 8]]
    assert run_ranks(calling, 2, [where]) == [called, called if where == "all" else [[], []]]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_other_precisions_train_and_leave_float32_weights(precision: Precision) -> None:
    plain, found = train(toy.task()), train(toy.task(), precision=precision)
    # fp16 may skip a step
    assert found.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=0.25)
    assert all(
        tensor.dtype in (torch.float32, torch.int64) for tensor in weights(found.model).values()
    )
    if precision != "tf32":  # which most CPUs cannot do
        assert found.sha256 != plain.sha256
    assert train(toy.task(precision=precision)).sha256 == found.sha256


def test_compile_keeps_the_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call.__self__) or call)
    result = train(toy.task(), compile=True, steps=1, run=tmp_path / "run")
    assert compiled == [result.model]
    assert result.checkpoint is not None
    assert set(files.read(result.checkpoint).tensors) == set(toy.Net().state_dict())
    train(toy.task(compile=True), compile=False, steps=1)
    assert len(compiled) == 1
    train(toy.task(compile=True), steps=1)
    assert len(compiled) == 2


@pytest.mark.parametrize(("exact", "dynamic"), [(True, False), (False, None)])
def test_in_exact_mode_no_kernel_depends_on_shapes_met_before(
    monkeypatch: pytest.MonkeyPatch, exact: bool, dynamic: bool | None
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda call, dynamic, **_: asked.append(dynamic) or call)
    train(toy.task(), compile=True, exact=exact, steps=1)
    assert asked == [dynamic]


def test_a_skipped_step_is_said_once_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weightless = toy.task(
        loss=lambda output, batch: (output.sum() * 0, 0), metrics=None, eval_data=None
    )
    said = pytest.warns(LockstepWarning, match="step 1 was skipped: every rank's weight is 0")
    with said, refused("no-step-applied", LockstepError, steps=1):
        train(weightless, steps=1, run=tmp_path / "run")
    assert "was skipped" not in capsys.readouterr().err
    skipped = records(tmp_path / "run", "event")[1]
    assert (skipped["event"], skipped["step"]) == ("step skipped", 1)
    assert skipped["reason"].startswith("every rank's weight is 0")
    assert records(tmp_path / "run", "step")[0]["loss"] == "nan"


def test_an_overflow_in_fp16_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overflowing = toy.task(
        loss=lambda output, batch: (output.sum() * 1e30, len(output)),
        metrics=None,
        eval_data=None,
        precision="fp16",
    )
    with refused("no-step-applied", LockstepError, steps=1):
        train(overflowing, steps=1, run=tmp_path / "run")
    assert "step 1 was skipped: gradients overflowed at loss scale 65536" in capsys.readouterr().err
    assert records(tmp_path / "run", "event")[1]["event"] == "step skipped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: 3}, r"model returned a int.*\[wrong-return-type\]"),
        (
            {"optimizer": lambda model: None},
            r"optimizer returned a NoneType.*\[wrong-return-type\]",
        ),
        (
            {"scheduler": lambda optimizer, steps: None},
            r"scheduler returned a NoneType.*\[wrong-return-type\]",
        ),
        (
            {"scheduler": lambda optimizer, steps: ReduceLROnPlateau(optimizer)},
            r"scheduler returned a ReduceLROnPlateau.* without a metric.*\[wrong-return-type\]",
        ),
        (
            {"best": "f1", "best_mode": "max"},
            r"'f1'.*accuracy, loss.* \[metric-not-measured\]",
        ),
        (
            {"loss": lambda output, batch: output.sum()},
            r"loss returned a Tensor.*\[wrong-return-type\]",
        ),
    ],
)
def test_what_the_tasks_functions_return_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        train(toy.task(**changes), steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, r"epochs=1 and steps=1 .*\[epochs-and-steps\]"),
        ({"epochs": 0}, "epochs=0"),
        ({"device": "tpu"}, r"device='tpu'.*auto, cpu, cuda.*\[unknown-choice\]"),
        ({"reduce": "gossip"}, "reduce='gossip' is unknown"),
        ({"compress": "gzip"}, "compress='gzip' is unknown"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"update": "server", "staleness": -1}, "staleness=-1"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        train(toy.task(), **options)


def test_only_a_task_is_trained_and_only_on_the_worlds_device() -> None:
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
    first, second = run_ranks(in_use, 2, [str(tmp_path)])
    assert first.endswith(" [run-finished]")
    assert second.startswith(f"rank 0 could not use the run directory {tmp_path}")
    assert second.endswith(" [rank-0-failed]")


class Failing(toy.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if World.current().rank == 1:
            raise ZeroDivisionError("mine")
        return super().forward(x)


def failing(world: World) -> None:
    train(toy.task(model=Failing))


def test_an_exception_in_the_model_on_one_rank_is_that_ranks() -> None:
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: mine") as failed:
        run_ranks(failing, 2)
    assert failed.value.rank == 1


def counted(world: World, asked: int | None) -> tuple[set[int], int, int]:
    """The intra-op threads that the loss saw, those before, and those after."""
    seen: set[int] = set()

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        seen.add(torch.get_num_threads())
        return toy.loss(output, batch)

    before = torch.get_num_threads()
    train(toy.task(loss=loss), threads=asked, steps=2)
    return seen, before, torch.get_num_threads()


@pytest.mark.parametrize(("asked", "seen"), [(None, 1), (3, 3)])
def test_threads_are_those_asked_for_and_the_old_ones_come_back(
    asked: int | None, seen: int
) -> None:
    assert run_ranks(counted, 2, (asked,)) == [({seen}, 1, 1)] * 2


def test_the_knobs_reach_what_they_turn() -> None:
    settings = Settings(task="toy", bucket_mb=0.0005, update="sharded", loader_workers=2)
    with lockstep.init(backend="gloo") as world:
        training = Training(toy.task(), settings, world, None)
    assert training.stepper.reducer.bucket_bytes == 524
    assert len(training.stepper.reducer.buckets) > 1
    assert training.stepper.update.name == "sharded"
    assert training.loader._loader.num_workers == 2


def buckets_and_weights(world: World, options: dict[str, Any]) -> dict[str, Tensor]:
    return weights(train(toy.task(), **options).model)


@pytest.mark.parametrize("reduce", ["native", "shared_memory"])
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_how_it_is_run_does_not_change_what_is_learned(reduce: str, update: str) -> None:
    options = {
        "reduce": reduce,
        "update": update,
        "bucket_mb": 0.0005,
        "threads": 2,
        "loader_workers": 1,
    }
    ranks = run_ranks(buckets_and_weights, 2, (options,))
    plain, _ = run_ranks(buckets_and_weights, 2, ({},))
    for found in ranks:
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6), name


def test_what_is_not_the_default_stands_in_the_first_line(tmp_path: Path) -> None:
    train(toy.task(), run=tmp_path / "one", steps=1, threads=2, loader_workers=1)
    run_ranks(
        buckets_and_weights,
        2,
        ({"run": str(tmp_path / "two"), "steps": 1, "reduce": "native", "bucket_mb": 0.5},),
    )
    lines = [
        records(tmp_path / run, "event")[0]["line"].rpartition("; ")[2] for run in ("one", "two")
    ]
    assert lines[0] == "replicated update, 2 threads a rank, 1 loader worker a rank"
    assert lines[1] == "gradients by native in buckets of 0.5 MiB, replicated update"


def test_loader_workers_change_nothing() -> None:
    assert train(toy.task(), loader_workers=1).sha256 == train(toy.task()).sha256


class Streamed(IterableDataset[Any]):
    """Some of the toy's samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(toy.data(20, 0)))


def streamed(world: lockstep.World, **options: Any) -> tuple[int, int, list[Tensor]]:
    task = toy.task(
        train_data=Streamed(), global_batch=8, micro_batch=4, eval_data=None, metrics=None
    )
    result = train(task, **options)
    return (
        result.steps,
        result.epochs,
        [parameter.detach() for parameter in result.model.parameters()],
    )


@pytest.mark.parametrize(
    ("options", "steps", "epochs"), [({"epochs": 2}, 6, 2), ({"steps": 4}, 4, 1)]
)
def test_a_stream_trains_alike_on_any_number_of_ranks(
    options: dict[str, int], steps: int, epochs: int
) -> None:
    alone = run_ranks(streamed, 1, kwargs=options)[0]
    assert alone[:2] == (steps, epochs)
    for found in run_ranks(streamed, 3, kwargs=options):
        assert found[:2] == alone[:2]
        for a, b in zip(found[2], alone[2], strict=True):
            assert torch.allclose(a, b, atol=1e-6)


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
