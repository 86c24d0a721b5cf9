"""What is refused, by its code and values: the words are errors.toml's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.errors import LockstepError, UsageError


@contextmanager
def refused(
    code: str, kind: type[LockstepError] = UsageError, /, **values: Any
) -> Iterator[pytest.ExceptionInfo[LockstepError]]:
    """The block raises an error of this kind, with this code and at least these values."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, str(error)
    assert error.values | values == error.values, str(error)
