"""What the task's functions return is checked where it arrives, and half precision ends before
the loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.task import Precision
from lockstep.errors import TaskError
from lockstep.step.forward import Forward, as_float32
from tests.refused import refused
from tests.training import toy

BATCH = toy.data(4, 0)[:]
CPU = torch.device("cpu")


def forward(precision: Precision = "fp32", **changes: Any) -> Forward:
    return Forward(toy.Net().eval(), toy.task(**changes), precision, CPU)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (torch.tensor(1.0), "Tensor"),
        ((1.0, 2), "tuple of float, int"),
        ((torch.tensor(1.0),), "tuple of Tensor"),
        ({"loss": 1.0}, "dict of 'loss': float"),
    ],
)
def test_a_loss_that_is_no_pair(returned: Any, shown: str) -> None:
    with refused("wrong-return-type", TaskError, function="Task: loss", type=shown):
        forward(loss=lambda output, batch: returned).loss(None, BATCH)


def test_metrics_that_are_no_sums_and_inputs_that_are_no_arguments() -> None:
    metric = "Task: metrics, for 'accuracy',"
    with refused("wrong-return-type", TaskError, function=metric, type="float"):
        forward(metrics=lambda output, batch: {"accuracy": 0.5}).metrics(None, BATCH)
    both = forward(metrics=lambda output, batch: {"loss": (1.0, 2)})
    with refused("metric-named-loss", TaskError):
        both.metrics(both(BATCH), BATCH)
    with refused("wrong-return-type", TaskError, function="Task: inputs", type="Tensor"):
        forward(inputs=lambda batch: batch[0])(BATCH)


def test_inputs_may_be_keywords() -> None:
    inside = forward(inputs=lambda batch: {"input": batch[0]})
    inside.model = nn.Linear(BATCH[0].shape[1], 2)
    assert torch.equal(inside(BATCH), inside.model(BATCH[0]))
    with refused("wrong-return-type", TaskError, function="Task: inputs", type="dict"):
        inside.inputs(BATCH)


def test_without_inputs_the_first_part_or_a_lone_tensor_is_the_argument() -> None:
    inside = forward()
    x, _ = BATCH
    for batch in (x, tuple(BATCH), list(BATCH)):
        assert torch.equal(inside(batch), inside.model(x))
    with refused("batch-needs-inputs", TaskError, kind="dict of 'x': Tensor"):
        inside({"x": x})


def test_a_batch_whose_samples_are_not_collated() -> None:
    inputs, targets = BATCH
    samples = list(zip(inputs, targets, strict=True))
    identity = forward(collate=lambda samples: samples)
    with refused(
        "wrong-return-type", TaskError, function="Task: collate", type="list of 4 samples"
    ):
        identity(samples)
    nested = [list(BATCH), list(BATCH)]  # one part may be several tensors
    assert identity.inputs(nested) == (nested[0],)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_covers_the_model_and_the_output_is_float32(precision: Precision) -> None:
    seen = []
    inside = forward(precision)
    inside.model.last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))  # type: ignore[union-attr,operator]
    output = inside(BATCH)
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float16]
    assert output.dtype == torch.float32
    assert not torch.equal(output, Forward(inside.model, toy.task(), "fp32", CPU)(BATCH))


def test_only_half_precision_is_made_float32() -> None:
    half = torch.ones(2, dtype=torch.bfloat16)
    found = as_float32({"a": (half, [half, "text"]), "b": torch.ones(1, dtype=torch.float64)})
    assert found["a"][0].dtype == found["a"][1][0].dtype == torch.float32
    assert found["a"][1][1] == "text"
    assert found["b"].dtype == torch.float64


def test_a_module_that_is_called_sees_its_inputs() -> None:
    two = Forward(
        nn.Bilinear(6, 6, 1), toy.task(inputs=lambda batch: (batch[0], batch[0])), "fp32", CPU
    )
    assert two(BATCH).shape == (4, 1)
