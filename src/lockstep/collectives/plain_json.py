"""Encode Python values as JSON and decode them exactly, without pickle: what optimizers, schedulers
and loaders keep besides tensors.

JSON has no tuples, sets, bytes or keys that are numbers. Such a value becomes {"!": its kind, "of":
its contents}.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.collectives.tensor_spec import as_bytes
from lockstep.errors import UsageError

_KIND, _OF = "!", "of"
_MOST = 2**22
"""Elements of a tensor in JSON, such as one of L-BFGS's history."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def encoded(value: Any, name: str) -> Any:
    """Return `value` as JSON. `name` stands for it in the UsageError for a value that does not
    fit.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, (np.generic, np.bool_)):
        return encoded(value.item(), name)
    if isinstance(value, Mapping):
        return _mapping(value, name)
    if kind in (list, tuple, set, frozenset):
        elements = [encoded(element, name) for element in value]
        if kind is list:
            return elements
        return {_KIND: kind.__name__, _OF: elements}
    if isinstance(value, bytes):
        return {_KIND: "bytes", _OF: _base64(value)}
    if isinstance(value, Tensor) and value.numel() <= _MOST:
        return {
            _KIND: "tensor",
            "dtype": dtype_name(value.dtype),
            "shape": list(value.shape),
            _OF: _base64(as_bytes(value.cpu()).numpy().tobytes()),
        }
    raise _not_storable(value, name)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _mapping(value: Mapping[Any, Any], name: str) -> Any:
    if type(value) not in (dict, Counter):
        raise _not_storable(value, name)
    pairs = [
        [encoded(key, name), encoded(element, f"{name}[{key!r}]")] for key, element in value.items()
    ]
    if type(value) is dict and all(type(key) is str for key in value) and _KIND not in value:
        return dict(pairs)
    return {_KIND: type(value).__name__, _OF: pairs}


def _not_storable(value: object, name: str) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UsageError("value-not-storable", what=name, type=kind)


def decoded(value: Any) -> Any:
    """Return the value that was encoded. Raises ValueError for what `encoded` does not write."""
    if isinstance(value, list):
        return [decoded(element) for element in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decoded(element) for key, element in value.items()}
    kind = value[_KIND]
    contents = value.get(_OF)
    if isinstance(contents, list):
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decoded(element) for element in contents)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({decoded(key): decoded(element) for key, element in contents})
    if isinstance(contents, str) and kind in ("bytes", "tensor"):
        data = base64.b64decode(contents, validate=True)
        if kind == "bytes":
            return data
        return _tensor(value, data)
    raise ValueError(f"a value of kind {kind!r} is unknown")


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter}


def _tensor(value: Mapping[str, Any], data: bytes) -> Tensor:
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's dtype {value.get('dtype')!r} is unknown")
    flat = torch.zeros(0, dtype=dtype)
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat.view([int(size) for size in value["shape"]])
