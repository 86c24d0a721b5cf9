"""Two run directories, compared: what differs first, what may differ, and what cannot be
compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.settings import Settings
from lockstep.tools.verify.finished_runs import differences, summary
from tests.checkpoints.model_alone import write_model
from tests.refused import refused


def run(
    path: Path,
    *,
    task: str = "digits",
    changes: dict[int, dict[str, Any]] | None = None,
    steps: int = 3,
    weight: float = 1.0,
) -> Path:
    path.mkdir()
    Settings(task=task).write(path)
    records: list[dict[str, Any]] = [{"kind": "event", "event": "start", "line": str(path)}]
    for step in range(1, steps + 1):
        record = {
            "kind": "step",
            "step": step,
            "loss": 1.0 / step,
            "weight": 8,
            "lr": 0.1,
            "samples_per_s": hash(path),
            "bytes_sent": len(str(path)),
        }
        records.append({**record, **(changes or {}).get(step, {})})
    records.append(
        {
            "kind": "evaluate",
            "step": steps,
            "epoch": 1,
            "metrics": {"accuracy": 0.5},
            "seconds": float(len(str(path))),
        }
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_model(
        path / "checkpoints",
        steps,
        {"layer.weight": torch.tensor([1.0, weight, 3.0]), "norm.count": torch.tensor(3)},
        {},
    )
    (path / "result.json").write_text("{}")
    return path


def test_equal_runs(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "another")
    assert differences(one, other) == []
    assert summary(one) == "3 steps, 1 evaluation and the weights of step-0000003"


def test_the_first_step_that_differs_and_the_weights(tmp_path: Path) -> None:
    one = run(tmp_path / "a")
    other = run(
        tmp_path / "b", changes={2: {"loss": 0.5000000000000001}, 3: {"lr": 0.2}}, weight=1.25
    )
    assert differences(one, other) == [
        "step 2: loss 0.5 and 0.5000000000000001",
        "weights (step-0000003): layer.weight differs in 1 of 3 elements, by 0.25 at most",
    ]


def test_a_sign_of_zero_is_a_bit(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a", weight=0.0), run(tmp_path / "b", weight=-0.0)
    assert differences(one, other) == [
        "weights (step-0000003): layer.weight differs in 1 of 3 elements, by 0 at most"
    ]


def test_runs_of_other_lengths(tmp_path: Path) -> None:
    found = differences(run(tmp_path / "a"), run(tmp_path / "b", steps=2))
    assert found == [
        "step 3 is in the first run only (3 and 2 in all)",
        "evaluation after step 2 is in the second run only (1 and 1 in all)",
    ]


def test_nan_and_other_evaluations(tmp_path: Path) -> None:
    one = run(tmp_path / "a", changes={1: {"loss": "nan"}})
    other = run(tmp_path / "b", changes={1: {"loss": "nan"}})
    assert differences(one, other) == []
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"accuracy": 0.5', '"accuracy": 0.75'))
    assert differences(one, other) == ["evaluation after step 3: accuracy 0.5 and 0.75"]


def test_a_step_that_was_taken_again_counts_as_it_was_last(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", changes={3: {"loss": 9.0}})
    with (other / "metrics.jsonl").open("a") as file:
        record = {"step": 3, "loss": 1.0 / 3, "weight": 8, "lr": 0.1, "samples_per_s": 1.0}
        file.write(json.dumps({"kind": "step", **record}) + "\n")
    assert differences(one, other) == []


def test_a_task_in_another_checkout_is_the_same_task(tmp_path: Path) -> None:
    assert (
        differences(
            run(tmp_path / "a", task="/here/my_task.py"),
            run(tmp_path / "b", task="/there/my_task.py"),
        )
        == []
    )


@pytest.mark.parametrize(
    ("broken", "code", "values"),
    [
        (
            lambda path: (path / "result.json").unlink(),
            "run-not-finished",
            {"missing": "result.json"},
        ),
        (
            lambda path: (path / "metrics.jsonl").write_text("{"),
            "cannot-read",
            {"file": "metrics.jsonl"},
        ),
        (lambda path: (path / "checkpoints").rename(path / "elsewhere"), "no-checkpoint", {}),
    ],
)
def test_runs_that_cannot_be_compared(
    tmp_path: Path, broken: Any, code: str, values: dict[str, Any]
) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    broken(other)
    where = {"file": other / values["file"]} if "file" in values else {"run": other, **values}
    with refused(code, **where):
        differences(one, other)


def test_a_folder_without_settings_is_no_run(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    (other / "settings.json").unlink()
    with refused("not-a-run-directory", directory=str(other)):
        differences(one, other)


def test_runs_of_two_tasks(tmp_path: Path) -> None:
    with refused("runs-of-two-tasks", tasks=["digits", "text"], other=tmp_path / "b"):
        differences(run(tmp_path / "a"), run(tmp_path / "b", task="text"))
