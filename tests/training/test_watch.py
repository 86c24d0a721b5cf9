"""The best so far, and how long ago."""

from __future__ import annotations

import pytest

from lockstep.errors import TaskError
from lockstep.task import Mode
from lockstep.training.watch import Watch


@pytest.mark.parametrize(("mode", "best", "waited"), [("max", 0.9, 3), ("min", 0.1, 1)])
def test_the_first_of_equals_is_the_best_and_nan_never_is(mode: Mode, best: float, waited: int) -> None:
    watch = Watch("f", mode)
    values = [float("nan"), 0.5, 0.9, 0.9, 0.1, float("nan")]
    better = [watch.better({"f": value}, step) for step, value in enumerate(values)]
    assert (watch.value, watch.waited) == (best, waited)
    assert watch.as_json() == {"metric": "f", "value": best, "step": values.index(best)}
    assert better == ([False, True, True, False, False, False] if mode == "max" else [False, True, False, False, True, False])


def test_a_metric_that_is_not_there() -> None:
    with pytest.raises(TaskError, match="'f1' shall be watched, but the metrics are accuracy, loss: use one of these"):
        Watch("f1", "max").better({"accuracy": 1.0, "loss": 0.0}, 1)
