"""Handles of collectives in flight: one class for each way to wait."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from lockstep.runtime import status

T = TypeVar("T")


class Work(Protocol):
    """A collective that has been started. Nothing may touch its tensors before `wait()` has
    returned.
    """

    def wait(self, timeout: timedelta | None = None) -> object: ...


def asks(work: Work) -> Callable[[], bool] | None:
    """Return a function that tells, without waiting, whether a work is done. None if the work only
    starts when somebody waits for it.
    """
    if isinstance(work, Handle):
        parts = []
        for part in work.works:
            part_done = asks(part)
            if part_done is None:
                return None
            parts.append(part_done)
        if parts:
            return lambda: all(part_done() for part_done in parts)
        return None
    done: Callable[[], bool] | None = getattr(work, "done", None)
    return done


def wait_on_page(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for a backend's work, and show on the status page that this rank waits."""
    status.waits(True)
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)
    status.waits(False)


class Done:
    """Work that was finished when it was started."""

    def wait(self, timeout: timedelta | None = None) -> None:
        return None


class Later(Generic[T]):
    """A collective that runs on a group's background thread. Its `wait` is that of a Handle."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> T:
        """Return the result when it is there. Raises the collective's error, or TimeoutError."""
        status.waits(True)
        seconds = None if timeout is None else timeout.total_seconds()
        result = self._future.result(seconds)
        status.waits(False)
        return result

    def done(self) -> bool:
        """Whether the result is there, without waiting."""
        return self._future.done()


class Handle(Generic[T]):
    """A collective in flight. `wait` returns the result; nothing may touch its tensors before that.
    Several may be in flight.

    Args:
        works: the parts to wait for.
        finish: makes the result after that. Without works it is the whole collective.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], T]) -> None:
        self.works = works
        self._finish = finish
        self._result: list[T] = []

    def wait(self, timeout: timedelta | None = None) -> T:
        """Return the result when it is there (on a GPU: when the current stream will wait for
        it). A later call returns it again.
        """
        if not self._result:
            for work in self.works:
                work.wait(timeout)
            self._result.append(self._finish())
            self.works = ()
        return self._result[0]


class Staged:
    """Collectives in sequence: each starts when the one before is done. The first has started."""

    def __init__(self, stages: Generator[Work]) -> None:
        self._stages = stages
        self._work: Work | None = next(stages, None)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all stages. A second call does nothing; a call after a timeout continues where
        it stopped.
        """
        while self._work is not None:
            self._work.wait(timeout)
            self._work = next(self._stages, None)

    def done(self) -> bool:
        """Whether the stage that has started is done, without waiting. The other stages start only
        in `wait`.
        """
        if self._work is None:
            return True
        done = asks(self._work)
        return done is not None and done()
