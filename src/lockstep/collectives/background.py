"""A thread that runs jobs in order, and does not keep the process from ending."""

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
    """A daemon thread that starts with its first job. It is no executor of the standard library:
    Python waits for those at exit, even if they hang.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._name = name
        self._thread: Thread | None = None

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Call `run` on the thread, after the jobs submitted before."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((run, future))
        return future

    def close(self) -> None:
        """End the thread after its jobs, and wait for it for up to 1 s. An idle thread has ended by
        then; one that hangs ends with the process.

        A thread that still runs when the interpreter ends may crash the process.
        """
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not current_thread():
                self._thread.join(_MOMENT)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            run, future = job
            del job
            try:
                result = run()
            except BaseException as error:  # raised in the thread that waits for the result
                del run
                future.set_exception(error)
                continue
            del run  # free what it refers to before the waiting thread continues
            future.set_result(result)
