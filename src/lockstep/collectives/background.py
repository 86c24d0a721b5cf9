"""A thread that does things one after the other, and does not keep a process from ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

_MOMENT = 1.0  # seconds

T = TypeVar("T")
_Job = tuple[Callable[[], Any], Future[Any]]


class Background:
    """The thread starts with the first thing to do. Not an executor of the standard library:
    Python waits for those at exit, even if they hang.
    """

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
        """End the thread after what is submitted, and wait for it for a moment. An idle thread has
        ended by then; one that hangs ends with the process.

        A thread that is still at it when the interpreter ends may take the whole process with it.
        """
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not current_thread():
                self._thread.join(_MOMENT)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            run, future = job
            del job
            try:
                result = run()
            except BaseException as error:  # it belongs to whoever waits
                del run
                future.set_exception(error)
                continue
            del run  # and what it holds, before anybody hears that it is done
            future.set_result(result)
