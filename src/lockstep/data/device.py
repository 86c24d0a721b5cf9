"""Moving a batch to a device, whatever it is made of, without copying what is there already."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, type(None))


def to_device(
    batch: Any, device: torch.device, *, non_blocking: bool = False, only_visible: bool = False
) -> Any:
    """The batch with every tensor in it on `device`.

    Goes through dicts, lists, tuples, named tuples, dataclasses and whatever has a `to` of its own
    (PackedSequence, BatchEncoding), and keeps their types; everything else is returned as it is.
    Where all tensors are on `device` already, the same object is returned. With `only_visible` what
    has a `to` of its own stays where it is, so that `tensors_in` finds all that was moved. Does not
    look into other objects, and does not wait for a `non_blocking` copy: work on the current stream
    comes after it anyway.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch if only_visible else batch.to(device)
    if isinstance(batch, _PLAIN):
        return batch
    move = partial(to_device, device=device, non_blocking=non_blocking, only_visible=only_visible)
    if isinstance(batch, (list, tuple)):
        items = [move(item) for item in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, Mapping):
        return _with_values(batch, {name: move(value) for name, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        moved = {name: move(value) for name, value in fields.items()}
        return batch if _same(moved, fields) else _with_fields(batch, moved)
    return batch


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors that `to_device(..., only_visible=True)` moves."""
    if isinstance(batch, torch.Tensor):
        yield batch
        return
    if isinstance(batch, (*_PLAIN, type)) or callable(getattr(batch, "to", None)):
        return
    if isinstance(batch, (list, tuple)):
        inside: Iterable[Any] = batch
    elif isinstance(batch, Mapping):
        inside = batch.values()
    elif dataclasses.is_dataclass(batch):
        inside = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        return
    for item in inside:
        yield from tensors_in(item)


def _same(new: Mapping[Any, Any], old: Mapping[Any, Any]) -> bool:
    return all(new[name] is old[name] for name in new)


def _with_values(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if _same(moved, batch):
        return batch
    if not isinstance(batch, MutableMapping):
        return moved
    result = copy.copy(batch)
    result.update(moved)
    return result


def _with_fields(batch: Any, moved: dict[str, Any]) -> Any:
    """A copy with other field values. Not dataclasses.replace: it runs __init__ again, which
    need not take every field.
    """
    result = copy.copy(batch)
    for name, value in moved.items():
        object.__setattr__(result, name, value)  # also where it is frozen
    return result
