"""Training steps measured: every variant takes steps, the slow ones are out, and what DDP cannot do
is refused in a sentence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config.settings import Settings
from lockstep.tools.bench.training_step import (
    VARIANTS,
    Key,
    Loop,
    StepComparison,
    StepRow,
    _like_the_first,
    _weights,
    finalists,
    measure,
    text,
)
from lockstep.world.world import World
from tests.refused import refused
from tests.teams import on_team


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def loss(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Samples weigh 1, 2 or 3, as texts of different lengths do."""
    return (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(), batch[2].sum()


def task(samples: int = 110, **changes: Any) -> lockstep.Task:
    """Five micro-batches a step, the last one smaller: on two ranks 3 and 2, of unequal weight."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=random)
    y, weights = torch.randint(0, 3, (2, samples), generator=random)
    made = lockstep.Task(
        name="small",
        model=Net,
        train_data=TensorDataset(x, y, 1 + weights),
        loss=loss,  # type: ignore[arg-type]
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        clip=0.5,
        global_batch=22,
        micro_batch=5,
    )
    return replace(made, **changes)


def after_steps(world: World) -> dict[str, list[Tensor]]:
    """The parameters after two rounds through the windows, by variant."""
    settings = Settings(task="small", workers=world.size)
    with lockstep.timing.trial(task(init_seed=0), settings, world) as base:
        windows = list(_like_the_first(base))
        assert [window.step for window in windows] == [0, 1, 2, 3]
        weights = _weights(base, windows)
        parameters = {"stepper": list(base.stepper.model.parameters())}
        steps: dict[str, Any] = {"stepper": base.step}
        for name in ("ddp:5", "wrapper"):
            steps[name] = loop = Loop(name, base, weights)
            parameters[name] = list(loop.model.parameters())
        for step in steps.values():
            for window in windows * 2:
                step(window)
        return {
            name: [tensor.detach().clone() for tensor in tensors]
            for name, tensors in parameters.items()
        }


def test_a_loop_around_a_ddp_makes_the_update_of_a_stepper() -> None:
    for parameters in on_team(after_steps, 2):
        for name in ("ddp:5", "wrapper"):
            for ours, expected in zip(parameters[name], parameters["stepper"], strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def measured() -> lockstep.Task:
    return task()


def too_small() -> lockstep.Task:
    return task(micro_batch=22)


def weightless() -> lockstep.Task:
    return task(loss=lambda output, batch: (output.sum() * 0, 0))


def test_every_variant_is_measured() -> None:
    settings = Settings(task="small", workers=2, device="cpu")
    result = measure(measured, settings, steps=2)
    assert {row.variant for row in result.rows} == set(VARIANTS) - set(result.left_out)
    assert all(len(row.seconds) in (2, 4, 6) for row in result.rows)
    assert (result.workers, result.device) == (2, "cpu")
    assert result.recipe.startswith("global batch 22 = 5 micro-batches x 5, the last 2; 2 ranks")
    assert {"stepper", "sharded"} <= {row.variant for row in result.rows}
    assert set(json.loads(json.dumps(result.as_json()))) >= {"rows", "fastest", "ddp", "workers"}


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(task="small", workers=2, device="cpu")
    with refused("fewer-micro-batches-than-ranks", workers=2, micro_batch=22):
        measure(too_small, settings)
    with pytest.raises(lockstep.errors.WorkerFailed, match="window-without-weight"):
        measure(weightless, settings, variants=["ddp:5"], steps=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused("too-few-gpus", workers=2, gpus=1):
        measure(measured, replace(settings, device="cuda"))


def test_clearly_slower_variants_are_out() -> None:
    seconds = {"ddp:5": 0.3, "ddp:25": 0.2, "stepper": 0.11, "sharded": 0.1, "weights": 0.13}
    medians = {Key(name, 1): value for name, value in seconds.items()}
    names = [key.variant for key in finalists(medians)]
    assert names == ["sharded", "stepper", "ddp:25"]


ROWS = [
    StepRow(variant="sharded", threads=1, seconds=[0.1, 0.1, 0.2]),
    StepRow(variant="ddp:25", threads=2, seconds=[0.2, 0.2, 0.2]),
    StepRow(variant="stepper", threads=1, seconds=[0.4]),
]
COMPARISON = StepComparison(
    task="small",
    recipe="",
    workers=2,
    device="cpu",
    gradient_mib=1.0,
    rows=ROWS,
    left_out={"weights": "no memory"},
)


def test_the_fastest() -> None:
    assert COMPARISON.fastest is ROWS[0]
    assert COMPARISON.ddp is ROWS[1]
    assert (ROWS[0].ratio(ROWS[1]), ROWS[2].ratio(ROWS[1])) == (2.0, 0.5)
    # one that stayed for more rounds is faster, whatever happened later
    assert sorted(reversed(ROWS), key=lambda row: row.order) == ROWS
    lines = text(COMPARISON).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["variant", "sharded", "ddp:25", "stepper"]
    assert lines[-2] == "weights is left out: no memory"
    assert lines[-1].endswith("sharded with 1 thread; ddp:25 with 2 threads takes +100.0 %")


def test_of_rows_that_are_as_fast_the_one_with_the_fewest_options() -> None:
    rows = [
        StepRow(variant="wrapper", threads=1, seconds=[0.99]),
        StepRow(variant="sharded", threads=1, seconds=[1.0]),
        StepRow(variant="stepper", threads=2, seconds=[1.015]),
        StepRow(variant="weights", threads=1, seconds=[1.04]),
    ]
    compared = replace(COMPARISON, rows=rows)
    assert compared.fastest is rows[2]
    assert [row.variant for row in rows if row.level_with(rows[0])] == ["wrapper", "sharded"]
    last = text(compared).splitlines()[-1]
    assert last.endswith("stepper with 2 threads; as fast, within 2 %: wrapper with 1 thread, sharded with 1 thread")  # fmt: skip
    slower = [*rows[:2], replace(rows[2], seconds=[1.03]), rows[3]]
    assert replace(compared, rows=slower).fastest is rows[1]
