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
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.errors import ReplicaDivergence

Fields = Mapping[str, Any]


def model_fields(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """The properties of a model that must be equal: torch's version, and every parameter's and
    buffer's name, in order, with shape, dtype, requires_grad.
    """
    fields: dict[str, Any] = {"torch version": torch.__version__}
    fields["list of parameters"] = [
        name for name, _ in module.named_parameters() if name not in ignored
    ]
    for name, parameter in module.named_parameters():
        if name in ignored:
            continue
        fields[f"parameter {name!r}"] = [
            *_form(parameter),
            "trained" if parameter.requires_grad else "frozen",
        ]
    fields["list of buffers"] = [name for name, _ in module.named_buffers() if name not in ignored]
    fields.update(
        {
            f"buffer {name!r}": _form(buffer)
            for name, buffer in module.named_buffers()
            if name not in ignored
        }
    )
    return fields


def optimizer_fields(optimizer: Optimizer) -> dict[str, Any]:
    """The properties of an optimizer that must be equal: its class and every group's settings."""
    fields: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            fields[f"optimizer group {number} {name}"] = (
                len(value) if name == "params" else _plain(value)
            )
    return fields


def optimizer_numbers(optimizer: Optimizer, device: torch.device) -> list[tuple[str, Tensor]]:
    """The numbers among every group's settings, such as the learning rate, as tensors by name."""
    as_tensor = partial(torch.as_tensor, dtype=torch.float64, device=device)
    return [
        (f"{name} of parameter group {number}", as_tensor(value))
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (int, float, Tensor)) or (name == "betas" and len(value))
    ]


def compare_start(group: Group, fields: Fields) -> None:
    """Compare `fields` among all ranks; every rank calls it. Raises ReplicaDivergence, on all
    ranks, naming the first field that differs.
    """
    if group.size == 1:
        return
    text = json.dumps(fields).encode()
    mine = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.distributed.get_backend(group.process_group) == "nccl"
        else torch.device("cpu")
    )
    hashes = group.all_gather(mine.to(device), place="for the comparison at the start").view(
        group.size, -1
    )
    if bool((hashes == hashes[0]).all()):
        return
    raise _difference(everybodys(fields, group.host, "for the comparison at the start"))


def _difference(everyone: Sequence[Fields]) -> ReplicaDivergence:
    first = everyone[0]
    for name in dict.fromkeys(name for fields in everyone for name in fields):
        values = [fields.get(name, "missing") for fields in everyone]
        ranks = [rank for rank, value in enumerate(values) if value != values[0]]
        if not ranks:
            continue
        ours, theirs = values[0], values[ranks[0]]
        if isinstance(ours, list) and isinstance(theirs, list) and name.startswith("list of "):
            return ReplicaDivergence(
                "ranks-set-up-differently",
                parameter=name,
                ranks=ranks,
                difference=_names(ours, theirs, ranks),
            )
        return ReplicaDivergence(
            "ranks-set-up-differently",
            parameter=name,
            ranks=ranks,
            difference=f"rank 0 has {_shown(ours)}, {listed(ranks)} {_have(ranks)}"
            f" {_shown(theirs)}",
        )
    raise AssertionError(f"hashes differ but no field does: {list(first)}")


def _names(ours: list[str], theirs: list[str], ranks: Sequence[int]) -> str:
    lacking = [name for name in ours if name not in theirs]
    more = [name for name in theirs if name not in ours]
    if not lacking and not more:
        place = next(
            number for number, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b
        )
        return (
            f"at position {place} rank 0 has {ours[place]!r}, {listed(ranks)} {_have(ranks)}"
            f" {theirs[place]!r}"
        )
    parts = [f"only rank 0 has {', '.join(map(repr, lacking[:5]))}"] if lacking else []
    parts += (
        [f"only {listed(ranks)} {_have(ranks)} {', '.join(map(repr, more[:5]))}"] if more else []
    )
    return "; ".join(parts)


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


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
