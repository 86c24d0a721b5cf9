"""The numbers that orders are made of, checked: whole numbers, weights, lengths; and a short
hash by which lists of them are told apart.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Numbers: TypeAlias = "Sequence[float] | NDArray[Any] | Tensor"


def whole(name: str, value: int, least: int = 1) -> int:
    """`value` as an int. Raises UsageError for what is no whole number, or is less than `least`."""
    try:
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name}={value!r}: give a whole number, {least} or more")


def weights(values: Numbers) -> NDArray[np.float64]:
    """Float64, shape [n], the largest 1. Raises UsageError, naming the index, unless all are
    finite, none negative, one positive.
    """
    found = _list("weights", values, np.float64)
    wrong = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if wrong.size:
        raise UsageError(
            f"weights[{wrong[0]}]={found[wrong[0]]}: a weight is finite and not negative"
        )
    if not found.any():
        raise UsageError(f"all {found.size} weights are 0: there is nothing to draw")
    scaled: NDArray[np.float64] = found / found.max()
    return scaled


def lengths(values: Numbers, least: int) -> NDArray[np.int64]:
    """Int64, shape [n]. Raises UsageError, naming the index, for what is no whole number or less
    than `least`.
    """
    found = _list("lengths", values, None)
    if found.dtype.kind not in "iu":
        raise UsageError(f"lengths are {found.dtype}, not whole numbers: give integers")
    wrong = np.flatnonzero(found < least)
    if wrong.size:
        raise UsageError(f"lengths[{wrong[0]}]={found[wrong[0]]}: a length is at least {least}")
    return found.astype(np.int64)


def _list(name: str, values: Numbers, dtype: Any) -> NDArray[Any]:
    try:
        found = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} are not a list of numbers: {error}") from error
    if found.ndim != 1:
        raise UsageError(f"{name} of shape {list(found.shape)}: give a list, one number each")
    if not found.size:
        raise UsageError(f"{name} are empty: give one number each")
    return found


def digest(values: NDArray[Any]) -> str:
    """SHA-256, in hex, of the numbers' bytes (little-endian, in order)."""
    return hashlib.sha256(
        np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes()
    ).hexdigest()


def short(values: NDArray[Any]) -> str:
    """The first 16 digits of `digest`."""
    return digest(values)[:16]
