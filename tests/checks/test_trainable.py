"""What replicas cannot train is refused by the Stepper and by the wrapper, by name, before the
first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checks.trainable import adds_up, check_trained
from tests.refused import refused


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with lockstep.init():
        yield


def _by_stepper(module: nn.Module) -> Any:
    return lockstep.Stepper(module, torch.optim.SGD(module.parameters(), lr=0.1))


DOORS: list[Callable[[nn.Module], Any]] = [_by_stepper, lockstep.DistributedDataParallel]


def _with(kind: str, name: str, tensor: torch.Tensor, *, trained: bool = True) -> nn.Module:
    inner = nn.Linear(2, 2)
    if kind == "buffer":
        inner.register_buffer(name, tensor)
    else:
        inner.register_parameter(name, nn.Parameter(tensor, requires_grad=trained))
    return nn.Sequential(inner)


@pytest.mark.parametrize("door", DOORS)
def test_tensors_and_layers_are_refused_by_name(door: Callable[[nn.Module], Any]) -> None:
    with refused("expanded-tensor", tensor="the parameter '0.wide'", shape=[4, 3]):
        door(_with("parameter", "wide", torch.ones(1, 3).expand(4, 3)))
    with refused("expanded-tensor", tensor="the buffer '0.mask'", shape=[2]):
        door(_with("buffer", "mask", torch.ones(1).expand(2)))
    with refused("sparse-tensor", tensor="the parameter '0.table'"):
        door(_with("parameter", "table", torch.eye(2).to_sparse()))
    narrow = torch.ones(2).to(torch.float8_e4m3fn)
    with refused("dtype-cannot-be-summed", parameter="0.scale", dtype="float8_e4m3fn"):
        door(_with("parameter", "scale", narrow))
    with refused("sync-batch-norm-on-cpu", layer="1"):
        door(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


@pytest.mark.parametrize("door", DOORS)
def test_what_can_be_trained_is_taken(door: Callable[[nn.Module], Any]) -> None:
    door(_with("parameter", "turned", torch.ones(2, 3).t()))
    door(_with("parameter", "complex", torch.ones(2, dtype=torch.complex128)))
    door(_with("parameter", "frozen", torch.ones(2).to(torch.float8_e4m3fn), trained=False))
    door(_with("buffer", "one", torch.ones(3).expand(1, 3)))


def test_a_model_elsewhere_than_its_world_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_trained(model, torch.device("cpu"))
    with refused("model-off-the-world", parameter="0.weight", device="cpu", world="cuda:0"):
        check_trained(model, torch.device("cuda", 0))
    check_trained(model.to("meta"), torch.device("cpu"))
    check_trained(model, torch.device("cuda"), {name for name, _ in model.named_parameters()})


def test_which_dtypes_add_up() -> None:
    wide = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    wide |= {torch.complex64, torch.complex128}
    narrow = {torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32}
    assert {dtype for dtype in wide | narrow if adds_up(dtype)} == wide
