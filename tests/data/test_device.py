"""Batches of any make reach the device with their types kept; what is there already is not
copied. The meta device stands for another one.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.device import to_device

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Single = namedtuple("Single", ["x"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


class Words(UserDict[str, Any]):
    """A mapping with something besides its items, as tokenizers return."""

    language = "en"


class Line(list[Any]):
    pass


def t() -> Tensor:
    return torch.ones(2)


BATCHES = [
    t(),
    [t(), t()],
    (t(), "text", 3, None),
    Pair(t(), t()),
    Single([t()]),
    {"x": t(), "deep": [(t(), {"y": t()})]},
    OrderedDict(x=t()),
    defaultdict(list, x=[t()]),
    Words(x=t()),
    Line([t()]),
    Frozen(t(), "name"),
]


def tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, (list, tuple)):
        return [tensor for item in batch for tensor in tensors(item)]
    if isinstance(batch, (dict, UserDict)):
        return [tensor for item in batch.values() for tensor in tensors(item)]
    return [batch.x, batch.twice] if isinstance(batch, Frozen) else []


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_every_tensor_moves_and_every_type_stays(batch: Any) -> None:
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert len(tensors(moved)) == len(tensors(batch)) > 0
    assert all(tensor.device == META for tensor in tensors(moved))
    assert all(tensor.device == CPU for tensor in tensors(batch)), "the batch itself was changed"


@pytest.mark.parametrize(
    "batch",
    [*BATCHES, MappingProxyType({"x": t()}), "text", 3, None, b"x", range(3)],
    ids=lambda batch: type(batch).__name__,
)
def test_where_it_is_already_it_is_the_same_object(batch: Any) -> None:
    assert to_device(batch, CPU, non_blocking=True) is batch


def test_what_is_no_tensor_is_kept() -> None:
    assert to_device((t(), "text", 3, None), META)[1:] == ("text", 3, None)
    assert to_device(defaultdict(list, x=t()), META).default_factory is list
    assert to_device(Frozen(t(), "name"), META).name == "name"


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    moved = to_device(MappingProxyType({"x": t()}), META)
    assert moved["x"].device == META


def test_what_can_move_itself_does() -> None:
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert packed.data.device == META
    assert packed.batch_sizes.device == CPU  # torch wants it there
