"""Two run directories, compared: what differs first, what may differ, and what cannot be
compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    """A run of so many steps. What may differ between runs differs: it is made of the path."""
    path.mkdir()
    Settings(task=task).write(path)
    records: list[dict[str, Any]] = [{"kind": "event", "event": "start", "line": str(path)}]
    for step in range(1, steps + 1):
        record = {"kind": "step", "step": step, "loss": 1.0 / step, "weight": 8, "lr": 0.1}
        speed = {"samples_per_s": hash(path), "bytes_sent": len(str(path))}
        records.append({**record, **speed, **(changes or {}).get(step, {})})
    evaluation = {"kind": "evaluate", "step": steps, "epoch": 1, "metrics": {"accuracy": 0.5}}
    records.append({**evaluation, "seconds": float(len(str(path)))})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = {"layer.weight": torch.tensor([1.0, weight, 3.0]), "norm.count": torch.tensor(3)}
    write_model(path / "checkpoints", steps, weights, {})
    (path / "result.json").write_text("{}")
    return path


def test_the_first_step_that_differs_and_the_weights(tmp_path: Path) -> None:
    one = run(tmp_path / "one")
    assert differences(one, run(tmp_path / "equal")).sentences == []
    assert summary(one) == "3 steps, 1 evaluation and the weights of step-0000003"
    changes = {2: {"loss": 0.5000000000000001}, 3: {"lr": 0.2}}
    assert differences(one, run(tmp_path / "other", changes=changes, weight=1.25)).sentences == [
        "step 2: loss 0.5 and 0.5000000000000001",
        "weights (step-0000003): layer.weight differs in 1 of 3 elements, by 0.25 at most",
    ]
    zero, minus_zero = run(tmp_path / "0", weight=0.0), run(tmp_path / "-0", weight=-0.0)
    assert differences(zero, minus_zero).sentences == [
        "weights (step-0000003): layer.weight differs in 1 of 3 elements, by 0 at most"
    ]
    assert differences(one, run(tmp_path / "shorter", steps=2)).sentences == [
        "step 3 is in the first run only (3 and 2 in all)",
        "evaluation after step 2 is in the second run only (1 and 1 in all)",
    ]


def test_nan_and_other_evaluations(tmp_path: Path) -> None:
    one = run(tmp_path / "a", changes={1: {"loss": "nan"}})
    other = run(tmp_path / "b", changes={1: {"loss": "nan"}})
    assert differences(one, other).sentences == []
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"accuracy": 0.5', '"accuracy": 0.75'))
    assert differences(one, other).sentences == ["evaluation after step 3: accuracy 0.5 and 0.75"]


def test_a_step_that_was_taken_again_counts_as_it_was_last(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", changes={3: {"loss": 9.0}})
    with (other / "metrics.jsonl").open("a") as file:
        record = {"step": 3, "loss": 1.0 / 3, "weight": 8, "lr": 0.1, "samples_per_s": 1.0}
        file.write(json.dumps({"kind": "step", **record}) + "\n")
    assert differences(one, other).sentences == []


def test_a_task_in_another_checkout_is_the_same_task(tmp_path: Path) -> None:
    here, there = "/here/my_task.py", "/there/my_task.py"
    assert (
        differences(run(tmp_path / "a", task=here), run(tmp_path / "b", task=there)).sentences == []
    )
    with refused("runs-of-two-tasks", tasks=["digits", "text"], other=tmp_path / "d"):
        differences(run(tmp_path / "c"), run(tmp_path / "d", task="text"))


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b")
    (other / "result.json").rename(tmp_path / "result.json")
    with refused("run-not-finished", run=other, missing="result.json"):
        differences(one, other)
    (tmp_path / "result.json").rename(other / "result.json")
    (other / "checkpoints").rename(tmp_path / "checkpoints")
    with refused("no-checkpoint", run=other):
        differences(one, other)
    (tmp_path / "checkpoints").rename(other / "checkpoints")
    (other / "metrics.jsonl").write_text("{")
    with refused("cannot-read", file=other / "metrics.jsonl"):
        differences(one, other)
    (other / "settings.json").unlink()
    with refused("not-a-run-directory", directory=str(other)):
        differences(one, other)
