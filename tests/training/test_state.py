"""How far a training has come: what a checkpoint says of it is what goes on, also where the task
watches something else since.
"""

from __future__ import annotations

import json
import math

import pytest

from lockstep.config.task import Mode
from lockstep.training.state import BestMetric, TrainingState


def state(*, best: str | None = None, patience: int | None = None) -> TrainingState:
    watched = BestMetric(best, "max") if best else None
    if patience is None:
        return TrainingState(watched, None, 0)
    return TrainingState(watched, BestMetric("loss", "min"), patience)


def test_what_is_written_is_what_is_gone_on_with() -> None:
    first = state(best="accuracy", patience=2)
    assert first.record({"accuracy": 0.5, "loss": 1.0}, 4)
    assert not first.record({"accuracy": 0.4, "loss": 1.5}, 8)
    first.loss, first.epochs, first.unevaluated = 0.25, 2, 3
    second = state(best="accuracy", patience=2)
    second.load(json.loads(json.dumps(first.as_json())))
    assert second.as_json() == first.as_json()
    assert second.stopped_early is None
    for each in (first, second):
        each.record({"accuracy": 0.4, "loss": 1.5}, 12)
        assert each.stopped_early == "loss has not improved on 1.0000 (step 4) for 2 evaluations"
        assert (each.evaluated, each.unevaluated) == (12, None)


def test_what_is_watched_since_begins_anew_and_what_is_not_is_left() -> None:
    before = state(patience=3)
    before.record({"accuracy": 0.9, "loss": 1.0}, 4)
    after = state(best="accuracy")
    after.load(before.as_json())
    assert after.record({"accuracy": 0.1, "loss": 2.0}, 8)
    assert after.patience is None


def test_the_headline_is_what_decides() -> None:
    metrics = {"loss": 2.0, "f1": 0.5, "accuracy": 0.75}
    for watched, headline in (
        (state(best="accuracy"), ("accuracy", 0.75)),
        (state(patience=1), ("loss", 2.0)),
        (state(), ("f1", 0.5)),
    ):
        watched.record(metrics, 1)
        assert watched.headline() == headline
    untold = state()
    assert untold.headline()[0] == "loss"
    assert math.isnan(untold.headline()[1])


@pytest.mark.parametrize(("mode", "better", "waited"), [("max", [1, 2], 3), ("min", [1, 4], 1)])
def test_the_first_of_equals_is_the_best_and_nan_never_is(
    mode: Mode, better: list[int], waited: int
) -> None:
    watch = BestMetric("f", mode)
    values = [float("nan"), 0.5, 0.9, 0.9, 0.1, float("nan")]
    assert [step for step in range(6) if watch.better({"f": values[step]}, step)] == better
    best = better[-1]
    assert (watch.value, watch.waited) == (values[best], waited)
    assert watch.as_json() == {"metric": "f", "value": values[best], "step": best}
