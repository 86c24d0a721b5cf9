"""Checks of the lists of numbers that orders get (weights, lengths), and hashes that identify such
lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lockstep.config.knob import number, whole
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Numbers: TypeAlias = "Sequence[float] | NDArray[Any] | Tensor"


def weights(values: Numbers) -> NDArray[np.float64]:
    """Return float64 weights, shape [n], scaled so that the largest is 1. Raises UsageError for a
    weight that is negative or not finite, naming its index, and if all are 0.
    """
    unscaled = _list("weights", values, np.float64)
    for index in np.flatnonzero(~np.isfinite(unscaled) | (unscaled < 0)):
        number(f"weights[{index}]", float(unscaled[index]), least=0)
    if not unscaled.any():
        raise UsageError("weights-all-zero", count=int(unscaled.size))
    scaled: NDArray[np.float64] = unscaled / unscaled.max()
    return scaled


def lengths(values: Numbers, least: int) -> NDArray[np.int64]:
    """Return int64 lengths, shape [n]. Raises UsageError if they are not whole numbers, or for one
    below `least`, naming its index.
    """
    array = _list("lengths", values, None)
    if array.dtype.kind not in "iu":
        raise UsageError(
            "not-a-list-of-numbers",
            name="lengths",
            why=f"they are {array.dtype}, not whole numbers",
        )
    for index in np.flatnonzero(array < least):
        whole(f"lengths[{index}]", int(array[index]), least)
    return array.astype(np.int64)


def _list(name: str, values: Numbers, dtype: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise UsageError("not-a-list-of-numbers", name=name, why=str(error)) from error
    if array.ndim != 1:
        raise UsageError(
            "not-a-list-of-numbers", name=name, why=f"their shape is {list(array.shape)}"
        )
    if not array.size:
        raise UsageError("not-a-list-of-numbers", name=name, why="there are none")
    return array


def digest(values: NDArray[Any]) -> str:
    """Return the SHA-256, in hex, of the numbers' bytes (little-endian, in order)."""
    little_endian = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return hashlib.sha256(little_endian.tobytes()).hexdigest()


def short(values: NDArray[Any]) -> str:
    """Return the first 16 digits of `digest`."""
    return digest(values)[:16]
