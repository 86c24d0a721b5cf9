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
from lockstep.errors import TaskError, UsageError, WorkerFailed
from lockstep.step.forward import Forward
from lockstep.testing import run_ranks
from lockstep.training.inference.evaluation import Evaluation
from tests.refused import refused
from tests.training import toy


def evaluated(
    world: lockstep.World, model: nn.Module, loader_workers: int = 0, **changes: Any
) -> dict[str, float]:
    task = toy.task(eval_micro_batch=4, **changes)
    return Evaluation(
        task, Forward(model, task, "fp32", world.device), world, loader_workers=loader_workers
    )()


def net() -> toy.Net:
    torch.manual_seed(3)
    return toy.Net()


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


def on_rank(world: lockstep.World) -> dict[str, dict[str, float]]:
    torch.manual_seed(5)
    stochastic = Stochastic()
    torch.manual_seed(100 + world.rank)
    random.seed(100 + world.rank)
    return {
        "plain": evaluated(world, net()),
        "random": evaluated(world, stochastic, eval_data=Noisy()),
    }


def test_the_same_bits_for_every_number_of_ranks() -> None:
    with lockstep.init(backend="gloo") as world:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        alone = on_rank(world)
        torch.set_num_threads(before)
    for workers in (2, 3, 7):  # 6 and 3 batches: ragged shares, and ranks that have none
        assert run_ranks(on_rank, workers) == [alone] * workers


def test_it_is_the_mean_over_the_whole_set() -> None:
    model, data = net(), toy.data(toy.HELD_OUT, 2)[:]
    with lockstep.init(backend="gloo") as world:
        found = evaluated(world, model)
    with torch.no_grad():
        output = model.eval()(data[0])
    assert list(found) == ["accuracy", "loss"]
    assert found["accuracy"] == (output.argmax(1) == data[1]).double().mean().item()
    assert found["loss"] == pytest.approx(
        nn.functional.cross_entropy(output, data[1]).item(), rel=1e-6
    )


def test_modes_gradients_and_random_states_are_put_back() -> None:
    model = net()
    model.norm.eval()
    statistics = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
    state = torch.get_rng_state()
    with lockstep.init(backend="gloo") as world:
        evaluated(world, model)
    assert (model.training, model.norm.training, model.drop.training) == (True, False, True)
    assert torch.equal(model.norm.running_mean, statistics)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loader_workers_change_nothing() -> None:
    with lockstep.init(backend="gloo") as world:
        model = net()
        assert evaluated(world, model, eval_data=Noisy(), loader_workers=1) == evaluated(
            world, model, eval_data=Noisy()
        )


def test_weights_of_zero_give_nan() -> None:
    with lockstep.init(backend="gloo") as world:
        found = evaluated(world, net(), metrics=lambda output, batch: {"none": (0.0, 0)})
    assert str(found["none"]) == "nan"


def test_metrics_that_change_their_names_or_are_no_numbers() -> None:
    def changing(output: Tensor, batch: Any) -> dict[str, tuple[float, int]]:
        return {f"of_{len(output)}": (1.0, 1)}

    with lockstep.init(backend="gloo") as world:
        with refused(
            "metric-names-changed", TaskError, names=["loss", "of_1"], first=["loss", "of_4"]
        ):
            evaluated(world, net(), metrics=changing)
        with refused("metric-not-a-number", TaskError, name="each", shapes=[[4], []]):
            evaluated(world, net(), metrics=lambda output, batch: {"each": (batch[1], 1)})


def wrong_on_one(world: lockstep.World) -> None:
    def metrics(output: Tensor, batch: Any) -> dict[str, tuple[float, int]]:
        raise ZeroDivisionError("mine")

    evaluated(world, net(), metrics=metrics if world.rank == 1 else None)


def test_an_exception_on_one_rank_is_told() -> None:
    with pytest.raises(WorkerFailed, match="mine") as failed:
        run_ranks(wrong_on_one, 2)
    assert failed.value.rank == 1


def directly(world: lockstep.World) -> dict[str, float]:
    return lockstep.evaluate(net(), toy.data(toy.HELD_OUT, 2), toy.metrics, batch=4)


def test_evaluate_gives_what_the_task_gives() -> None:
    with lockstep.init(backend="gloo") as world:
        expected = evaluated(world, net())["accuracy"]
        assert directly(world) == {"accuracy": expected}
        data = [{"x": x, "y": y} for x, y in toy.data(toy.HELD_OUT, 2)]
        found = lockstep.evaluate(
            net(),
            data,  # type: ignore[arg-type]  # a list of samples does too
            lambda output, batch: toy.metrics(output, (None, batch["y"])),
            batch=4,
            inputs=lambda batch: {"x": batch["x"]},
        )
        assert found == {"accuracy": expected}
    assert run_ranks(directly, 8) == [{"accuracy": expected}] * 8


def unsynced(world: lockstep.World) -> tuple[dict[str, float], list[float]]:
    wrapper = lockstep.DistributedDataParallel(net())
    wrapper.module.norm.running_mean += world.rank
    found = lockstep.evaluate(
        wrapper, toy.data(9, 2), lambda output, batch: {"sum": (output.sum(), 1)}, batch=4
    )
    return found, wrapper.module.norm.running_mean.tolist()


def test_a_wrappers_statistics_are_averaged_first() -> None:
    first, second = run_ranks(unsynced, 2)
    assert first == second
    assert first[1] == pytest.approx([0.5] * 16)


def first_parts(output: Tensor, batch: Any) -> dict[str, Any]:
    return {
        "weighted": (output.sum(), len(output)),
        "renamed": (output.argmax(1), batch[1]),
        "mean": (output[:, 0],),
    }


def with_torchmetrics(world: lockstep.World) -> dict[str, str]:
    from torchmetrics import MeanMetric, Metric
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
    )
    from torchmetrics.collections import MetricCollection

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

    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3, average="micro"),
            "auroc": MulticlassAUROC(3),  # whole outputs, as lists
            "mean": MeanMetric(),  # sums of float32
            "ordered": Ordered(),
            "renamed": MulticlassAccuracy(3, average="macro"),
        },
        compute_groups=False,
    )
    found = lockstep.evaluate(
        net(), toy.data(toy.HELD_OUT, 2), first_parts, metrics=metrics, batch=4
    )
    assert not any(metric.update_called for metric in metrics.values())
    with refused("metric-not-a-number", name="grid", shapes=[[3, 3]]):
        lockstep.evaluate(net(), toy.data(5, 2), metrics={"grid": MulticlassConfusionMatrix(3)})
    return {name: value.hex() for name, value in found.items()}


def test_torchmetrics_objects_have_the_same_bits_for_every_number_of_ranks() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    with lockstep.init(backend="gloo") as world:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        alone = with_torchmetrics(world)
        torch.set_num_threads(before)
    x, y = toy.data(toy.HELD_OUT, 2)[:]
    with torch.no_grad():
        output = net().eval()(x)
    found = {name: float.fromhex(value) for name, value in alone.items()}
    assert found["accuracy"] == pytest.approx((output.argmax(1) == y).float().mean().item())
    assert found["auroc"] == pytest.approx(
        torchmetrics.functional.classification.multiclass_auroc(output, y, 3).item()
    )
    assert found["ordered"] == pytest.approx(
        (output[:, 0] * torch.arange(len(y))).sum().item(), rel=1e-5
    )
    assert found["mean"] == pytest.approx(output[:, 0].mean().item())
    assert found["renamed"] == pytest.approx(
        torchmetrics.functional.classification.multiclass_accuracy(output.argmax(1), y, 3).item()
    )
    for workers in (2, 8):  # 6 batches
        assert run_ranks(with_torchmetrics, workers) == [alone] * workers


def task_with_torchmetrics(world: lockstep.World) -> dict[str, str]:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    means: dict[str, Any] = {
        "mean": (MeanMetric(), lambda output, batch: (output[:, 0],)),
        "auroc": MulticlassAUROC(3),
    }
    accuracies = [MulticlassAccuracy(3, average=how) for how in ("micro", "macro")]
    named = MetricCollection(dict(zip(("micro", "macro"), accuracies, strict=True)))
    found = (
        evaluated(world, net(), metrics=means)
        | evaluated(world, net(), metrics=named)
        | evaluated(world, net(), metrics=accuracies[0])
    )
    assert not any(metric.update_called for metric in accuracies)
    return {name: value.hex() for name, value in found.items()}


def test_torchmetrics_objects_of_a_task() -> None:
    from torchmetrics import MeanMetric
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_auroc

    with lockstep.init(backend="gloo") as world:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        alone = task_with_torchmetrics(world)
        torch.set_num_threads(before)
        with refused("not-a-metric", name="a", type="int"):
            evaluated(world, net(), metrics={"a": 1})
        with refused("not-a-metric", name="a", type="tuple"):
            evaluated(world, net(), metrics={"a": (MeanMetric(),)})
        with refused("metric-named-loss", TaskError):
            evaluated(world, net(), metrics={"loss": toy.metrics})
    x, y = toy.data(toy.HELD_OUT, 2)[:]
    with torch.no_grad():
        output = net().eval()(x)
    micro = multiclass_accuracy(output, y, 3, average="micro")
    expected = {
        "mean": output[:, 0].mean(),
        "auroc": multiclass_auroc(output, y, 3),
        "micro": micro,
        "macro": multiclass_accuracy(output, y, 3, average="macro"),
        "MulticlassAccuracy": micro,
    }
    found = {name: float.fromhex(value) for name, value in alone.items()}
    assert list(found)[:2] == ["loss", "mean"]
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-6), name
    for workers in (2, 3, 8):  # 6 batches: ragged shares, and ranks that have none
        assert run_ranks(task_with_torchmetrics, workers) == [alone] * workers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": None}, r"\[nothing-to-measure\]"),
        (
            {"fn": lambda output, batch: 1.0},
            r"fn returned a float.* a dict of name .* \[wrong-return-type\]",
        ),
        (
            {"fn": lambda output, batch: {"a": output.sum()}},
            r"fn, for 'a', returned a Tensor.*\(sum, weight\).* \[wrong-return-type\]",
        ),
        ({"batch": 0}, r"batch=0: .* at least 1.* \[wrong-value\]"),
        ({"dataset": []}, r"the data set \(a list\) is empty.* \[empty-dataset\]"),
        (
            {"dataset": [{"x": 1.0}]},
            r"batches are of type dict.*\[batch-needs-inputs\]",
        ),
        (
            {"metrics": {"a": sum}},
            r"metrics\['a'\] is a builtin_function_or_method.* \[not-a-metric\]",
        ),
    ],
)
def test_mistakes_are_sentences(options: dict[str, Any], message: str) -> None:
    arguments = {"model": net(), "dataset": toy.data(5, 2), "fn": toy.metrics, **options}
    with lockstep.init(backend="gloo"), pytest.raises(UsageError, match=message):
        lockstep.evaluate(arguments.pop("model"), arguments.pop("dataset"), **arguments)
