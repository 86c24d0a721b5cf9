"""Every sample counts once, whatever the number of ranks, and the numbers are the same to the
last bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep.errors import TaskError
from lockstep.step.forward import Forward
from lockstep.training.inference.evaluation import Evaluation
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

WORKERS = (3, 8)
"""Of 6 and of 3 batches: ragged shares, and ranks that have none."""


def evaluated(
    world: lockstep.World, model: nn.Module, loader_workers: int = 0, **changes: Any
) -> dict[str, float]:
    task = toy.task(eval_micro_batch=4, **changes)
    forward = Forward(model, task, "fp32", world.device)
    return Evaluation(task, forward, world, loader_workers=loader_workers)()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from the sample's stream."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6) + random.random(), torch.tensor(index % 3)


class Stochastic(toy.Net):
    """Draws in the forward, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


def on_rank(world: lockstep.World) -> list[dict[str, float]]:
    torch.manual_seed(5)
    stochastic = Stochastic()
    torch.manual_seed(100 + world.rank)
    random.seed(100 + world.rank)
    return [
        evaluated(world, toy.net()),
        evaluated(world, stochastic, eval_data=Noisy()),
        lockstep.evaluate(toy.net(), toy.data(toy.HELD_OUT, 2), toy.metrics, batch=4),
    ]


def test_the_same_bits_for_every_number_of_ranks() -> None:
    alone = toy.alone(on_rank)
    assert alone[2] == {"accuracy": alone[0]["accuracy"]}
    for workers in WORKERS:
        assert on_team(on_rank, workers) == [alone] * workers


def test_it_is_the_mean_over_the_whole_set() -> None:
    model, data = toy.net(), toy.data(toy.HELD_OUT, 2)[:]
    with lockstep.init(backend="gloo") as world:
        found = evaluated(world, model)
    with torch.no_grad():
        output = model.eval()(data[0])
    assert list(found) == ["accuracy", "loss"]
    assert found["accuracy"] == (output.argmax(1) == data[1]).double().mean().item()
    loss = nn.functional.cross_entropy(output, data[1]).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


def test_modes_gradients_and_random_states_are_put_back() -> None:
    model = toy.net()
    model.norm.eval()
    statistics = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
    state = torch.get_rng_state()
    with lockstep.init(backend="gloo") as world:
        evaluated(world, model)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert torch.equal(model.norm.running_mean, statistics)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loader_workers_and_inputs_by_name_change_nothing_and_weights_of_zero_give_nan() -> None:
    samples: Any = [{"x": x, "y": y} for x, y in toy.data(toy.HELD_OUT, 2)]
    with lockstep.init(backend="gloo") as world:
        model = toy.net()
        plain = evaluated(world, model, eval_data=Noisy())
        assert evaluated(world, model, eval_data=Noisy(), loader_workers=1) == plain
        by_name = lockstep.evaluate(
            model,
            samples,
            lambda output, batch: toy.metrics(output, (None, batch["y"])),
            batch=4,
            inputs=lambda batch: {"x": batch["x"]},
        )
        assert by_name == {"accuracy": evaluated(world, model)["accuracy"]}
        weightless = evaluated(world, model, metrics=lambda output, batch: {"none": (0.0, 0)})
        assert str(weightless["none"]) == "nan"


# -- torchmetrics --------------------------------------------------------------------------------


def first_parts(output: Tensor, batch: Any) -> dict[str, Any]:
    return {
        "weighted": (output.sum(), len(output)),
        "renamed": (output.argmax(1), batch[1]),
        "mean": (output[:, 0],),
    }


def with_torchmetrics(world: lockstep.World) -> list[dict[str, str]]:
    """Bits of lockstep.evaluate's values, and of a task's."""
    from torchmetrics import MeanMetric, Metric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    class Ordered(Metric):
        """Its value depends on the order of its state."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", [], dist_reduce_fx="cat")

        def update(self, output: Tensor, y: Tensor) -> None:
            self.seen.append(output[:, 0])

        def compute(self) -> Tensor:
            seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
            return (seen * torch.arange(len(seen))).sum()

    collection = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "auroc": MulticlassAUROC(3),  # whole outputs, as lists
            "mean": MeanMetric(),  # sums of float32
            "ordered": Ordered(),
            "renamed": MulticlassAccuracy(3, average="macro"),
        },
        compute_groups=False,
    )
    data = toy.data(toy.HELD_OUT, 2)
    direct = lockstep.evaluate(toy.net(), data, first_parts, metrics=collection, batch=4)
    means: dict[str, Any] = {
        "mean": (MeanMetric(), lambda output, batch: (output[:, 0],)),
        "auroc": MulticlassAUROC(3),
    }
    micro, macro = (MulticlassAccuracy(3, average=average) for average in ("micro", "macro"))
    named = MetricCollection({"micro": micro, "macro": macro})
    of_task = [evaluated(world, toy.net(), metrics=metrics) for metrics in (means, named, micro)]
    assert not any(metric.update_called for metric in (*collection.values(), micro, macro))
    with refused("metric-not-a-number", name="each", shapes=[[3]]):
        lockstep.evaluate(toy.net(), data, metrics={"each": MulticlassAccuracy(3, average="none")})
    return [{name: value.hex() for name, value in values.items()} for values in (direct, *of_task)]


def test_torchmetrics_objects_have_the_same_bits_for_every_number_of_ranks() -> None:
    functional = pytest.importorskip("torchmetrics").functional.classification
    alone = toy.alone(with_torchmetrics)
    x, y = toy.data(toy.HELD_OUT, 2)[:]
    with torch.no_grad():
        output = toy.net().eval()(x)
    micro = functional.multiclass_accuracy(output, y, 3, average="micro").item()
    macro = functional.multiclass_accuracy(output, y, 3, average="macro").item()
    auroc = functional.multiclass_auroc(output, y, 3).item()
    mean = output[:, 0].mean().item()
    ordered = (output[:, 0] * torch.arange(len(y))).sum().item()
    weighted = output.sum().item() / len(y)
    direct, means, named, single = (
        {name: float.fromhex(value) for name, value in values.items()} for values in alone
    )
    expected = {"accuracy": micro, "auroc": auroc, "ordered": ordered, "mean": mean}
    expected |= {"renamed": macro, "weighted": weighted}
    assert direct == pytest.approx(expected, rel=1e-5)
    assert list(means)[:2] == ["loss", "mean"]
    loss = {"loss": means["loss"]}
    assert means == pytest.approx(loss | {"mean": mean, "auroc": auroc}, rel=1e-6)
    assert named == pytest.approx(loss | {"micro": micro, "macro": macro}, rel=1e-6)
    assert single == pytest.approx(loss | {"MulticlassAccuracy": micro}, rel=1e-6)
    for workers in WORKERS:
        assert on_team(with_torchmetrics, workers) == [alone] * workers


# -- refused -------------------------------------------------------------------------------------


def test_metrics_of_a_task_that_cannot_work_are_refused() -> None:
    from torchmetrics import MeanMetric

    def changing(output: Tensor, batch: Any) -> dict[str, tuple[float, int]]:
        return {f"of_{len(output)}": (1.0, 1)}

    with lockstep.init(backend="gloo") as world:
        names = {"names": ["loss", "of_1"], "first": ["loss", "of_4"]}
        with refused("metric-names-changed", TaskError, **names):
            evaluated(world, toy.net(), metrics=changing)
        with refused("metric-not-a-number", TaskError, name="each", shapes=[[4], []]):
            evaluated(world, toy.net(), metrics=lambda output, batch: {"each": (batch[1], 1)})
        with refused("not-a-metric", name="a", type="int"):
            evaluated(world, toy.net(), metrics={"a": 1})
        with refused("not-a-metric", name="a", type="tuple"):
            evaluated(world, toy.net(), metrics={"a": (MeanMetric(),)})
        with refused("metric-named-loss", TaskError):
            evaluated(world, toy.net(), metrics={"loss": toy.metrics})


def test_mistakes_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"fn": None}, "nothing-to-measure", {}),
        ({"fn": lambda output, batch: 1.0}, "wrong-return-type", {"type": "float"}),
        ({"fn": lambda output, batch: {"a": output.sum()}}, "wrong-return-type", {}),
        ({"batch": 0}, "wrong-value", {"name": "batch", "value": 0}),
        ({"dataset": []}, "empty-dataset", {}),
        ({"dataset": [{"x": 1.0}]}, "batch-needs-inputs", {}),
        ({"metrics": {"a": sum}}, "not-a-metric", {"name": "a"}),
    ]
    for options, code, values in cases:
        arguments = {"dataset": toy.data(5, 2), "fn": toy.metrics, **options}
        with lockstep.init(backend="gloo"), refused(code, **values):
            lockstep.evaluate(toy.net(), arguments.pop("dataset"), **arguments)
