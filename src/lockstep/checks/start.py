"""Checks that all ranks were set up alike, once, before anything is broadcast. Ranks compare one
hash, and exchange the details only if it differs.

A model built differently on one rank, another learning rate, another data set: training with any of
these raises no error, and is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.errors import ReplicaDivergence

Fields = Mapping[str, Any]
_PLACE = "for the comparison at the start"


def model_fields(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """The properties of a model that must be equal: torch's version, and every parameter's and
    buffer's name, in order, with shape, dtype, requires_grad.
    """
    fields: dict[str, Any] = {"torch version": torch.__version__}
    parameters = {name: value for name, value in module.named_parameters() if name not in ignored}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    fields["list of parameters"] = list(parameters)
    for name, parameter in parameters.items():
        trained = "trained" if parameter.requires_grad else "frozen"
        fields[f"parameter {name!r}"] = [*_form(parameter), trained]
    fields["list of buffers"] = list(buffers)
    for name, buffer in buffers.items():
        fields[f"buffer {name!r}"] = _form(buffer)
    return fields


def optimizer_fields(optimizer: Optimizer) -> dict[str, Any]:
    """The properties of an optimizer that must be equal: its class and every group's settings."""
    fields: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            compared = len(value) if name == "params" else _plain(value)
            fields[f"optimizer group {number} {name}"] = compared
    return fields


def optimizer_numbers(optimizer: Optimizer, device: torch.device) -> list[tuple[str, Tensor]]:
    """The numbers among every group's settings, such as the learning rate, as tensors by name."""
    as_tensor = partial(torch.as_tensor, dtype=torch.float64, device=device)
    numbers = []
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, (int, float, Tensor)) or (name == "betas" and len(value)):
                numbers.append((f"{name} of parameter group {index}", as_tensor(value)))
    return numbers


def compare_start(group: Group, fields: Fields) -> None:
    """Compare `fields` among all ranks; every rank calls it. Raises ReplicaDivergence, on all
    ranks, naming the first field that differs.
    """
    if group.size == 1:
        return
    text = json.dumps(fields).encode()
    local = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    if torch.distributed.get_backend(group.process_group) == "nccl":
        local = local.cuda()
    hashes = group.all_gather(local, place=_PLACE).view(group.size, -1)
    if not bool((hashes == hashes[0]).all()):
        raise _difference(everybodys(fields, group.host, _PLACE))


def _difference(by_rank: Sequence[Fields]) -> ReplicaDivergence:
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        values = [fields.get(name, "missing") for fields in by_rank]
        first = values[0]
        ranks = [rank for rank, value in enumerate(values) if value != first]
        if not ranks:
            continue
        other = values[ranks[0]]
        others = f"{listed(ranks)} {'has' if len(ranks) == 1 else 'have'}"
        if isinstance(first, list) and isinstance(other, list) and name.startswith("list of "):
            difference = _names(first, other, others)
        else:
            difference = f"rank 0 has {_shown(first)}, {others} {_shown(other)}"
        return ReplicaDivergence(
            "ranks-set-up-differently", parameter=name, ranks=ranks, difference=difference
        )
    raise AssertionError(f"hashes differ but no field does: {list(by_rank[0])}")


def _names(first: list[str], other: list[str], others: str) -> str:
    """Return how the names on rank 0 differ from other ranks'. `others` is such as "ranks 1, 2
    have".
    """
    only_first = [name for name in first if name not in other]
    only_other = [name for name in other if name not in first]
    if not only_first and not only_other:
        position = 0
        while first[position] == other[position]:
            position += 1
        return (
            f"at position {position} rank 0 has {first[position]!r}, {others} {other[position]!r}"
        )
    parts = []
    if only_first:
        parts.append(f"only rank 0 has {', '.join(map(repr, only_first[:5]))}")
    if only_other:
        parts.append(f"only {others} {', '.join(map(repr, only_other[:5]))}")
    return "; ".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(str(part) for part in value)
    return str(value)


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch.")]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    # not repr, which may contain an address
    return getattr(value, "__qualname__", type(value).__qualname__)
