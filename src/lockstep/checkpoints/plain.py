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

from lockstep.errors import UsageError

_KIND, _OF = "!", "of"


def encoded(value: Any, what: str) -> Any:
    """Return `value` as JSON. `what` names it in the UsageError for a value that does not fit."""
    if value is None or (
        isinstance(value, (bool, int, float, str)) and type(value) in (bool, int, float, str)
    ):
        return value
    if isinstance(value, (np.generic, np.bool_)):
        return encoded(value.item(), what)
    if type(value) is list:
        return [encoded(each, what) for each in value]
    if isinstance(value, Mapping):
        return _mapping(value, what)
    if type(value) in (tuple, set, frozenset):
        return {_KIND: type(value).__name__, _OF: [encoded(each, what) for each in value]}
    if isinstance(value, bytes):
        return {_KIND: "bytes", _OF: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor) and value.numel() <= 1024:
        dtype = str(value.dtype).removeprefix("torch.")
        octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {
            _KIND: "tensor",
            "dtype": dtype,
            "shape": list(value.shape),
            _OF: base64.b64encode(octets).decode("ascii"),
        }
    raise _not_storable(value, what)


def _mapping(value: Mapping[Any, Any], what: str) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and _KIND not in value:
        return {key: encoded(each, f"{what}[{key!r}]") for key, each in value.items()}
    if type(value) not in (dict, Counter):
        raise _not_storable(value, what)
    pairs = [[encoded(key, what), encoded(each, f"{what}[{key!r}]")] for key, each in value.items()]
    return {_KIND: type(value).__name__, _OF: pairs}


def _not_storable(value: object, what: str) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UsageError("value-not-storable", what=what, type=kind)


def decoded(value: Any) -> Any:
    """Return the value that was encoded. Raises ValueError for what `encoded` does not write."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decoded(each) for key, each in value.items()}
    kind, parts = value[_KIND], value.get(_OF)
    if kind in _SEQUENCES and isinstance(parts, list):
        return _SEQUENCES[kind](decoded(each) for each in parts)
    if kind in _MAPPINGS and isinstance(parts, list):
        return _MAPPINGS[kind]({decoded(key): decoded(each) for key, each in parts})
    if kind == "bytes" and isinstance(parts, str):
        return base64.b64decode(parts, validate=True)
    if kind == "tensor" and isinstance(parts, str):
        return _tensor(value, base64.b64decode(parts, validate=True))
    raise ValueError(f"a value of kind {kind!r} is unknown")


_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter}


def _tensor(value: Mapping[str, Any], octets: bytes) -> Tensor:
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's dtype {value.get('dtype')!r} is unknown")
    flat = (
        torch.frombuffer(bytearray(octets), dtype=dtype) if octets else torch.zeros(0, dtype=dtype)
    )
    return flat.view([int(size) for size in value["shape"]])
