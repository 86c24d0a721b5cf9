"""Collectives of tensors that torch.inference_mode made: such a tensor can be written to in that
mode only, and threads have modes of their own.

A collective therefore works on ordinary tensors, and its result is copied to where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.collectives.handle import Handle

C = TypeVar("C", bound=Callable[..., Any])


def of_ordinary_tensors(collective: C) -> C:
    """Have a collective of `tensor` or `tensors`, its first argument, see ordinary tensors.
    Without inference mode nothing is copied.
    """

    @wraps(collective)
    def call(*args: Any, **options: Any) -> Any:
        name = next((name for name in ("tensor", "tensors") if name in options), None)
        given = args[0] if args else options.get(name or "")
        if not torch.is_inference_mode_enabled() and not any(
            each.is_inference() for each in _each(given)
        ):
            return collective(*args, **options)
        with torch.inference_mode(False):
            plain = (
                given
                if given is None
                else (
                    given.clone() if isinstance(given, Tensor) else [each.clone() for each in given]
                )
            )
            answer = collective(
                plain, *args[1:], **{key: value for key, value in options.items() if key != name}
            )

        def result(found: Any) -> Any:
            if found is not plain or given is None:
                return found
            with torch.inference_mode():
                return given.copy_(plain)

        return (
            Handle([answer], lambda: result(answer.wait()))
            if options.get("async_op")
            else result(answer)
        )

    return call  # type: ignore[return-value]


def _each(given: Tensor | Sequence[Tensor] | None) -> Sequence[Tensor]:
    return (given,) if isinstance(given, Tensor) else given or ()
