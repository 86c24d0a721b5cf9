"""What is refused, by its code and values: the words are errors.toml's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.errors import LockstepError, UsageError


class Refusal:
    """What a block raised; there after the block."""

    value: LockstepError


@contextmanager
def refused(
    code: str, kind: type[LockstepError] = UsageError, /, **values: Any
) -> Iterator[Refusal]:
    """The block raises an error of this kind, with this code and at least these values."""
    refusal = Refusal()
    try:
        yield refusal
    except kind as raised:
        # its traceback would hold this frame, and with it the test's, until the garbage collector comes
        error = refusal.value = raised.with_traceback(None)
    else:
        pytest.fail(f"nothing was refused: {code}")
    assert error.code == code, str(error)
    assert error.values | values == error.values, str(error)
