"""Each logger's own reader finds one run of all ranks, each step once, also after a kill, with the
hyper-parameters and the SHA-256 of the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.training.loggers import LOGGERS, LoggedRun, Loggers
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


def quiet(variables: dict[str, str]) -> dict[str, str]:
    """The environment, without the loggers' own variables but for these."""
    theirs = ("WANDB_", "MLFLOW_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return {**kept, "WANDB_MODE": "offline", **variables}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two ranks that were killed after step 6 and resumed from step 3."""
    folder = tmp_path_factory.mktemp("loggers")
    (folder / "mine.py").write_text(KILLED)
    # one reduction: both starts must have the same bits, and "auto" may choose another one
    options = "--workers 2 --run run --checkpoint-every 3 --max-restarts 1 --set width=7"
    options += " --reduce native"
    command = f"-m lockstep train mine.py {options} --log wandb,mlflow --log tensorboard --log csv"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=quiet({"WANDB_PROJECT": "theirs", "MLFLOW_EXPERIMENT_NAME": "theirs"}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "killed").exists()
    assert "logger failed" not in (folder / "run" / "metrics.jsonl").read_text()
    assert done.stdout.count("\n") == 1, "one line, for all that the loggers print"
    return folder / "run"


def same(found: dict[str, Any], run: Path, rel: float = 0.0) -> None:
    """Each step and each evaluation once, with the journal's numbers."""
    expected = logged.of_journal(run)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, 9))
    for name, values in expected.items():
        assert found[name] == [(step, pytest.approx(value, rel=rel)) for step, value in values], (
            name
        )


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def test_wandb_has_one_run_and_the_last_file_is_all_of_it(killed: Path) -> None:
    before, after = logged.of_wandb(killed)
    assert (after["id"], after["project"]) == (before.get("id", after["id"]), "theirs")
    assert after["id"] == json.loads((killed / "loggers.json").read_text())["wandb"]
    assert {path.name.rpartition("-")[2] for path in killed.glob("wandb/offline-run-*")} == {
        after["id"]
    }
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


def test_mlflow_has_one_run_and_each_step_once(killed: Path) -> None:
    run, history = logged.of_mlflow(f"sqlite:///{killed}/mlflow.db")
    same(history, killed)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["global_batch"] == "11"
    assert (run.data.params["set.width"], run.data.params["seed"]) == ("7", "0")
    assert run.data.tags["sha256"] == result(killed)["sha256"]


def test_tensorboard_shows_each_step_once(killed: Path) -> None:
    assert len(list(killed.glob("events.out.tfevents.*"))) == 2
    events, found = logged.of_tensorboard(killed)
    same(found, killed, rel=1e-6)
    (text,) = events.Tensors("sha256/text_summary")
    assert text.tensor_proto.string_val == [result(killed)["sha256"].encode()]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_csv_has_a_row_for_each_step(killed: Path) -> None:
    same(logged.of_csv(killed), killed)


def test_one_that_fails_is_left_out_and_training_ends_well(tmp_path: Path) -> None:
    def on_step(record: Any) -> None:
        if record["step"] == 2:  # the next row with a new column opens the file again
            (tmp_path / "run" / "metrics.csv").unlink()
            (tmp_path / "run" / "metrics.csv").mkdir()

    with lockstep.init(backend="gloo"):
        task = toy.task(on_step=on_step)
        done = lockstep.train(task, run=tmp_path / "run", log=["csv", "tensorboard"])
    assert done.steps == 8
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (failed,) = [each for each in map(json.loads, lines) if each.get("event") == "logger failed"]
    assert "IsADirectoryError" in failed["line"]
    _, found = logged.of_tensorboard(tmp_path / "run")
    assert len(found["train/loss"]) == 8


def new(path: Path, step: int = 0) -> LoggedRun:
    return LoggedRun(
        path=path, records=path / "metrics.jsonl", task="toy", step=step, parameters={"seed": 0}
    )


def test_without_a_key_the_way_without_a_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keyless(run: LoggedRun) -> Any:
        raise ValueError("No API key configured.")

    monkeypatch.setitem(LOGGERS, "wandb", keyless)
    with refused("logger-not-opened", name="wandb") as refusal:
        Loggers(("wandb",), new(tmp_path))
    assert "WANDB_MODE=offline" in refusal.value.values["reason"]


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


def test_tensorboard_is_there_without_being_asked_for(tmp_path: Path) -> None:
    loggers = Loggers((), new(tmp_path))
    for record in (STEP, {"kind": "event", "event": "start", "step": 9}, EVALUATE):
        loggers.add(record)
    loggers.close("FINISHED")
    _, found = logged.of_tensorboard(tmp_path)
    assert found == {
        "train/loss": [(3, 0.5)],
        "train/lr": [(3, pytest.approx(0.1))],
        "train/samples_per_s": [(3, 7.0)],
        "train/epoch": [(3, 1.0)],
        "train/workers": [(3, 2.0)],
        "evaluate/accuracy": [(3, 0.75)],
    }


def test_what_is_not_installed_is_refused_where_it_was_asked_for(
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


def test_loggers_need_a_run_directory() -> None:
    with refused("needs-run-directory", name="log", value=("csv",)):
        lockstep.train(toy.task(), log="csv", steps=1)


def test_a_run_whose_records_stayed_elsewhere_is_logged_from_there_on(tmp_path: Path) -> None:
    loggers = Loggers(["csv"], new(tmp_path, step=5))  # only its checkpoint was copied here
    loggers.close("FINISHED")
    assert loggers.problems == []
