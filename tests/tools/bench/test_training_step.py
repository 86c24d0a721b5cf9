"""Training steps measured: every way makes the same update, one that does not is named, and what
DDP cannot do is refused in a sentence.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config.settings import Settings
from lockstep.errors import TaskError
from lockstep.tools.bench import baselines, training_step
from lockstep.tools.bench.baselines import WeighedWindow, feed
from lockstep.tools.bench.training_step import BASELINES, StepComparison, StepRow, measure
from lockstep.world.world import World
from tests.refused import refused
from tests.teams import on_team

OURS = [name for name in baselines.OURS if name != "local"]
EVERY = [name for name in (*BASELINES, *OURS) if baselines.why_not(name, 2, "cpu") is None]


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(F.dropout(x, self.dropout, self.training))
        return found


def loss(output: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Samples weigh 1, 2 or 3, as texts of different lengths do."""
    return (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(), batch[2].sum()


def task(dropout: float = 0.0, samples: int = 110, **changed: Any) -> lockstep.Task:
    """Five micro-batches a step, the last one smaller: on two ranks 3 and 2, of unequal weight."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=random)
    y, weights = torch.randint(0, 3, (2, samples), generator=random)
    whole = lockstep.Task(
        name="small",
        model=lambda: Net(dropout),
        train_data=TensorDataset(x, y, 1 + weights),
        loss=loss,  # type: ignore[arg-type]
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        scheduler=lambda optimizer, steps: LinearLR(optimizer, total_iters=steps),
        clip=0.5,
        global_batch=22,
        micro_batch=5,
    )
    return replace(whole, **changed)


def after_steps(world: World, dropout: float) -> tuple[dict[str, list[Tensor]], list[list[int]]]:
    """The parameters after two rounds through the windows, by way, and what each window was."""
    made = task(dropout)
    given = feed(made, "fp32", world)
    assert given.draws == (dropout > 0)
    setting = baselines.Setting(
        task=made, world=world, precision="fp32", steps=8, keyed=given.draws
    )
    built = baselines.build([name for name in EVERY if name != "local"], setting, {})
    for _ in range(2):
        for window in given.given:
            for way in built.values():
                way(window)
    cut = [[len(window.batches), window.window.samples] for window in given.given]
    return {
        name: [parameter.detach().clone() for parameter in way.model.parameters()]
        for name, way in built.items()
    }, cut


def in_one_process(dropout: float) -> list[Tensor]:
    """The same steps by hand: all micro-batches of all ranks, one after the other."""
    made = task(dropout)
    lockstep.runtime.randomness.shared(made.seed)
    model = made.model()
    optimizer = made.optimizer(model)
    assert made.scheduler is not None
    scheduler = made.scheduler(optimizer, 8)
    loader = lockstep.Loader(
        made.train_data, global_batch=22, micro_batch=5, seed=made.seed, rank=0, size=1
    )
    windows = [list(window) for window in next(loader.epochs(1))][:4]
    for step in range(8):
        optimizer.zero_grad()
        found = []
        for slot, batch in enumerate(windows[step % 4]):
            lockstep.runtime.randomness.step(made.seed, step % 4, slot)
            found.append(made.loss(model(*made.inputs(batch)), batch))
        (sum(part for part, _ in found) / sum(weight for _, weight in found)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.rest), 0.5])
def test_all_ways_make_the_update_of_one_process(dropout: float) -> None:
    ranks = on_team(after_steps, 2, args=(dropout,))
    assert [cut for _, cut in ranks] == [[[3, 15]] * 4, [[2, 7]] * 4]
    expected = in_one_process(dropout)
    for found, _ in ranks:
        assert {"ddp:5", *OURS} <= set(found)
        for name, parameters in found.items():
            for ours, theirs in zip(parameters, expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


class Unweighted(baselines.TorchDDP):
    """What is often written: each rank's mean, averaged."""

    def scale(self, given: WeighedWindow) -> float:
        return 1 / given.own


def apart(world: World, *, wrong: bool) -> dict[str, float]:
    made = task()
    given = feed(made, "fp32", world)
    setting = baselines.Setting(task=made, world=world, precision="fp32", steps=8, keyed=False)
    built = baselines.build(["ddp:25", "local", "stepper:native"], setting, {})
    if wrong:
        built["ddp:100"] = Unweighted(setting, 100)
    start = [parameter.detach().clone() for parameter in built["ddp:25"].model.parameters()]
    for window in given.given:
        for way in built.values():
            way(window)
    return training_step._apart({name: way.model for name, way in built.items()}, start, world)


def test_ways_that_train_something_else_lie_far_above_the_tolerance() -> None:
    found, other = on_team(partial(apart, wrong=True), 2)
    assert found == other
    assert found["stepper:native"] < 1e-4
    assert found["local"] > 0.3  # bfloat16's tolerance
    assert found["ddp:100"] > 0.1


def test_measured_on_ranks_with_memory() -> None:
    found = measure(task, workers=2, variants=["ddp:25", "stepper:shared"], steps=2, memory=True)
    assert [row.variant for row in found.rows] == ["ddp:25", "stepper:shared"]
    assert found.recipe == "global batch 22 = 5 micro-batches x 5, the last 2; 2 ranks: 3, 2"
    assert found.gradient_mib == pytest.approx(4 * (6 * 16 + 16 + 32 + 16 * 3 + 3) / 2**20)
    assert [len(row.seconds) for row in found.rows] == [2, 2]
    assert all(row.peak_mib is not None and row.peak_mib > 0 for row in found.rows)
    reference, ours = (row.apart for row in found.rows)
    assert reference is None
    assert ours is not None
    assert ours < 1e-4
    assert (found.wrong, found.notes) == ([], [])


def test_on_one_rank_the_bare_loop_is_compared_and_nobody_shares_memory() -> None:
    variants = ["local", "stepper:native", "stepper:shared"]
    found = measure(partial(task, 0.3), workers=1, variants=variants, steps=1)
    assert found.left_out == {"stepper:shared": "one rank has nobody to share memory with"}
    assert found.rows[0].apart is None
    assert found.rows[1].apart == pytest.approx(0, abs=1e-6)
    assert [note.partition(":")[0] for note in found.notes] == ["the model draws random numbers"]
    assert baselines.why_not("wrapper:shared", 2, "cuda") is not None

    halves = partial(task, precision="fp16", scheduler=None)
    found = measure(halves, workers=1, variants=variants[:2], steps=1)
    assert [row.apart for row in found.rows] == [None, None]  # these weights are not compared
    assert "not compared" in found.notes[0]


COMPARISON = StepComparison(
    task="small",
    recipe="as it is",
    workers=2,
    device="cpu",
    precision="fp32",
    steps=3,
    gradient_mib=1.5,
    rows=[
        StepRow(variant="local", seconds=[0.1, 0.1, 0.1]),
        StepRow(variant="ddp:5", seconds=[0.4, 0.3, 0.2], peak_mib=9.5),
        StepRow(variant="ddp:25", seconds=[0.2, 0.2, 0.2], apart=1e-8),
        StepRow(variant="stepper:shared", seconds=[0.1, 0.1, 0.1], apart=0.2),
    ],
    left_out={"fabric": "not there"},
    notes=["a note"],
)


def test_the_fastest_is_a_variant_of_train_that_made_the_same_update() -> None:
    rows = [
        StepRow(variant="ddp:5", seconds=[0.1, 0.1]),
        StepRow(variant="wrapper:shared", seconds=[0.1, 0.1], apart=0.0),
        StepRow(variant="stepper:shared", seconds=[0.2, 0.2], apart=0.2),
        StepRow(variant="stepper:native", seconds=[0.4, 0.4], apart=0.0),
        StepRow(variant="stepper:sharded", seconds=[0.3, 0.3], apart=0.0),
    ]
    fastest = replace(COMPARISON, rows=rows).fastest
    assert fastest is not None
    assert fastest.variant == "stepper:sharded"
    assert replace(COMPARISON, rows=rows[:3]).fastest is None


def test_the_options_of_a_variant_are_those_of_its_stepper() -> None:
    for name, options in training_step.OPTIONS_OF_VARIANT.items():
        maker = baselines.OURS[name]
        assert isinstance(maker, partial)
        default = {"reduce": "auto", "update": "replicated", "weights": "auto"}
        assert default | maker.keywords == default | options
        Settings(task="digits", **options)


def test_json_and_table_name_what_trained_something_else() -> None:
    figures = json.loads(json.dumps(COMPARISON.as_json()))
    assert (figures["best"], figures["fastest"], figures["tolerance"]) == ("ddp:25", None, 0.1)
    assert [row["ratio"] for row in figures["rows"]] == pytest.approx([2, 2 / 3, 1, 2])
    assert (figures["rows"][1]["median"], figures["rows"][1]["p25"]) == (0.3, 0.2)
    assert "stepper:shared trained something else" in training_step.text(COMPARISON)
    # within what 8 bits round
    assert "something else" not in training_step.text(replace(COMPARISON, precision="bf16"))


SAME = Net(0.0)


def wrong_tasks(world: World) -> None:
    setting = baselines.Setting(
        task=task(model=lambda: SAME), world=world, precision="fp32", steps=1, keyed=False
    )
    with refused("model-returned-twice", TaskError):
        baselines.build(["local", "stepper:native"], setting, {})
    with refused("window-without-weight", task="small", weight=0.0):
        feed(task(loss=lambda output, batch: (output.sum(), 0)), "fp32", world)


def test_tasks_that_cannot_be_measured() -> None:
    on_team(wrong_tasks, 2)


@pytest.mark.parametrize(
    ("changed", "code", "values"),
    [
        (
            {"variants": ["dpd:5"]},
            "unknown-choice",
            {"name": "variant", "value": "dpd:5", "choices": ["ddp:MB", *baselines.OURS]},
        ),
        ({"variants": ["ddp:0"]}, "wrong-value", {"name": "bucket", "value": 0}),
        ({"variants": ["ddp:many"]}, "wrong-value", {"value": "many"}),
        ({"variants": ["stepper"]}, "unknown-choice", {"value": "stepper"}),
        (
            {"variants": ["ddp:5", "ddp:5"]},
            "given-twice",
            {"where": "variants=ddp:5,ddp:5", "name": "ddp:5"},
        ),
        ({"variants": ["stepper:shared"], "workers": 1}, "no-variant-left", {}),
        ({"workers": 5, "device": "cuda", "variants": ["ddp:5"]}, "too-few-gpus", {"workers": 5}),
        ({"steps": 0}, "wrong-value", {"name": "steps", "value": 0}),
        (
            {"workers": 6},
            "fewer-micro-batches-than-ranks",
            {"workers": 6, "task": "small", "global_batch": 22, "micro_batch": 5},
        ),
        # the data set does not fill the first step
        ({"source": partial(task, samples=7)}, "fewer-micro-batches-than-ranks", {"workers": 2}),
    ],
)
def test_mistakes_start_nothing(
    changed: dict[str, Any], code: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_step, "launch", None)
    options = {"source": task, "workers": 2, **changed}
    with refused(code, **values):
        measure(options.pop("source"), **options)
