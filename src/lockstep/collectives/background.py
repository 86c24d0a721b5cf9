"""A thread that does things one after the other, and does not keep a process from ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Future[Any]]


class Background:
    """The thread starts with the first thing to do. Not an executor of the standard library: those are waited for at exit, also where they hang."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._name = name
        self._thread: Thread | None = None

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Have `run` called after what was submitted before."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((run, future))
        return future

    def close(self) -> None:
        """End the thread after what is submitted; nobody waits for it."""
        if self._thread is not None:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, future = job
            try:
                future.set_result(run())
            except BaseException as error:  # it belongs to whoever waits
                future.set_exception(error)
