"""Each logger's own reader finds one run of all ranks, each step once, also after a kill, with the
hyper-parameters and the SHA-256 of the weights.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.training.loggers import LOGGERS, LoggedRun, Loggers
from tests.cli.command import process
from tests.refused import refused
from tests.training import logged, toy

KILLED = """
import os
from pathlib import Path
from tests.training import toy

def on_step(record):
    if record["step"] == 6 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), 9)

def task(width: int = 1):
    return toy.task(name=None, clip=1.0, on_step=on_step)
"""
STEP = {
    "kind": "step",
    "step": 3,
    "epoch": 1,
    "loss": 0.5,
    "lr": 0.1,
    "samples_per_s": 7.0,
    "samples_by_rank": [1, 2],
}
EVALUATE = {"kind": "evaluate", "step": 3, "epoch": 1, "metrics": {"accuracy": 0.75}}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two ranks that were killed after step 6 and resumed from step 3."""
    folder = tmp_path_factory.mktemp("loggers")
    (folder / "mine.py").write_text(KILLED)
    # one reduction: both starts must have the same bits, and "auto" may choose another one
    ended = process(
        "train mine.py --workers 2 --run run --checkpoint-every 3 --max-restarts 1 --set width=7"
        " --reduce native --log wandb,mlflow --log tensorboard --log csv",
        folder,
        WANDB_MODE="offline",
        WANDB_PROJECT="theirs",
        MLFLOW_EXPERIMENT_NAME="theirs",
    )
    assert ended.code == 0, ended.err
    assert (folder / "killed").exists()
    assert "logger failed" not in (folder / "run" / "metrics.jsonl").read_text()
    assert ended.out.count("\n") == 1, "one line, for all that the loggers print"
    return folder / "run"


def same(logged_values: dict[str, Any], run: Path, rel: float = 0.0) -> None:
    """Each step and each evaluation once, with the journal's numbers."""
    expected = logged.of_journal(run)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 9))
    for name, values in expected.items():
        approximate = [(step, pytest.approx(value, rel=rel)) for step, value in values]
        assert logged_values[name] == approximate, name


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


@pytest.mark.rest
def test_wandb_has_one_run_and_the_last_file_is_all_of_it(killed: Path) -> None:
    before, after = logged.of_wandb(killed)
    assert (after["id"], after["project"]) == (before.get("id", after["id"]), "theirs")
    assert after["id"] == json.loads((killed / "loggers.json").read_text())["wandb"]
    files = {path.name.rpartition("-")[2] for path in killed.glob("wandb/offline-run-*")}
    assert files == {after["id"]}
    assert after["steps"] == list(range(1, 9))
    history: dict[str, Any] = {}
    for step, values in after["history"].items():
        for name, value in values.items():
            history.setdefault(name, []).append((step, value))
    same(history, killed)
    assert after["config"]["global_batch"] == 11
    assert (after["config"]["set.width"], after["config"]["optimizer.0.lr"]) == ("7", 0.1)
    assert after["summary"]["sha256"] == result(killed)["sha256"]
    assert after["exit"] == 0


@pytest.mark.rest
def test_mlflow_has_one_run_and_each_step_once(killed: Path) -> None:
    run, history = logged.of_mlflow(f"sqlite:///{killed}/mlflow.db")
    same(history, killed)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["global_batch"] == "11"
    assert (run.data.params["set.width"], run.data.params["seed"]) == ("7", "0")
    assert run.data.tags["sha256"] == result(killed)["sha256"]


@pytest.mark.rest
def test_tensorboard_and_csv_have_each_step_once_after_a_kill(killed: Path) -> None:
    assert len(list(killed.glob("events.out.tfevents.*"))) == 2
    check_files(killed)


def check_files(run: Path) -> None:
    events, found = logged.of_tensorboard(run)
    same(found, run, rel=1e-6)
    (text,) = events.Tensors("sha256/text_summary")
    assert text.tensor_proto.string_val == [result(run)["sha256"].encode()]
    assert "_hparams_/session_start_info" in events.summary_metadata
    same(logged.of_csv(run), run)


def test_each_step_is_logged_once_after_an_error_and_a_logger_that_fails_is_left_out(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"

    def fails(record: Any) -> None:
        if record["step"] == 6:
            raise ArithmeticError

    def spoils(record: Any) -> None:
        if record["step"] == 2:  # the next row with a new column opens the file again
            (run / "metrics.csv").unlink()
            (run / "metrics.csv").mkdir()

    options: dict[str, Any] = {"checkpoint_every": 3, "log": ["csv", "tensorboard"]}
    with pytest.raises(ArithmeticError):
        lockstep.train(toy.task(clip=1.0, on_step=fails), run=run, **options)
    lockstep.train(toy.task(clip=1.0), run=run, **options)
    check_files(run)
    run = tmp_path / "spoilt"
    assert lockstep.train(toy.task(on_step=spoils), run=run, **options).steps == 8
    events = toy.records(run, "event")
    (failed,) = [event for event in events if event["event"] == "logger failed"]
    assert "IsADirectoryError" in failed["line"]
    _, scalars = logged.of_tensorboard(run)
    assert len(scalars["train/loss"]) == 8


def new(path: Path, step: int = 0) -> LoggedRun:
    return LoggedRun(
        path=path, records=path / "metrics.jsonl", task="toy", step=step, parameters={"seed": 0}
    )


@pytest.mark.rest  # imports MLflow
def test_a_store_that_does_not_answer_is_told_at_the_start_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with refused("logger-not-opened", name="mlflow"):
        Loggers(("csv", "mlflow"), new(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    resumed = Loggers(("csv", "mlflow"), new(tmp_path, step=3))
    assert len(resumed.problems) == 1
    resumed.add(EVALUATE)
    resumed.close("FAILED")
    assert logged.of_csv(tmp_path)["train/loss"] == [(3, 0.5)]
    assert logged.of_csv(tmp_path)["evaluate/accuracy"] == [(3, 0.75)]


def test_what_is_not_installed_or_does_not_open_is_refused_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with refused("missing-extra", what="log=wandb", package="wandb"):
        lockstep.train(toy.task(), run=tmp_path / "run", log="csv,wandb")
    assert not (tmp_path / "run").exists()
    loggers = Loggers((), new(tmp_path))
    loggers.add(STEP)
    loggers.close("FINISHED")
    assert not list(tmp_path.iterdir())

    def keyless(run: LoggedRun) -> Any:
        raise ValueError("No API key configured.")

    monkeypatch.undo()
    monkeypatch.setitem(LOGGERS, "wandb", keyless)
    with refused("logger-not-opened", name="wandb"):
        Loggers(("wandb",), new(tmp_path))


def test_loggers_need_a_run_directory_but_no_records(tmp_path: Path) -> None:
    with refused("needs-run-directory", name="log", value=("csv",)):
        lockstep.train(toy.task(), log="csv", steps=1)
    loggers = Loggers(["csv"], new(tmp_path, step=5))  # only its checkpoint was copied here
    loggers.close("FINISHED")
    assert loggers.problems == []


def test_tensorboard_reads_what_is_written_without_its_writer(tmp_path: Path) -> None:
    """Any name, any step, and values that 32 bits cannot hold."""
    beyond = {"large": 1e300, "small": -1e300, "infinite": math.inf, "none": math.nan}
    written: dict[int, dict[str, Any]] = {
        1: {"loss": 0.5},
        128: {"loss": -1.25, "über": 2},
        129: beyond,
        2**40: {"a" * 300: 1e-3},
    }
    board = Loggers((), new(tmp_path))
    for step, values in written.items():
        board.add({**EVALUATE, "step": step, "metrics": values})
    board.close("FINISHED")
    events, found = logged.of_tensorboard(tmp_path)
    assert all(event.wall_time > 1e9 for event in events.Scalars("evaluate/loss"))
    read: dict[int, dict[str, float]] = {}
    for tag, values_by_step in found.items():
        for step, value in values_by_step:
            read.setdefault(step, {})[tag.removeprefix("evaluate/")] = value
    assert read.keys() == written.keys()
    large, small, infinite, none = (read[129][name] for name in beyond)
    assert (large, small, infinite) == (math.inf, -math.inf, math.inf)
    assert math.isnan(none)
    for step in written.keys() - {129}:
        assert read[step] == pytest.approx(written[step], rel=1e-6)
