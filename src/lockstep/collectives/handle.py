"""What an asynchronous collective returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Generic, TypeVar

from lockstep.collectives.group import Work
from lockstep.runtime import status

T = TypeVar("T")


class Later(Generic[T]):
    """A collective that a group's background thread does: waited for like a Handle."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> T:
        """Return the result when it is there. Raises what the collective raised, and
        TimeoutError.
        """
        status.waits(True)
        found = self._future.result(None if timeout is None else timeout.total_seconds())
        status.waits(False)
        return found

    def done(self) -> bool:
        """Whether the result is there, without waiting."""
        return self._future.done()


class Handle(Generic[T]):
    """A collective that is under way. Its tensors must not be touched before `wait`, which
    returns the result; several may be in flight.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self._works = works
        self._finish = finish
        self._result: list[T] = []

    def wait(self, timeout: timedelta | None = None) -> T:
        """Return the result when it is there (on a GPU: when the current stream will wait for
        it). A later call returns it again.
        """
        if not self._result:
            for work in self._works:
                work.wait(timeout)
            self._result.append(self._finish())
            self._works = ()
        return self._result[0]
