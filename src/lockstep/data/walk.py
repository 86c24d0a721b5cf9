"""One walk through one epoch: batches from torch's DataLoader, each once and in order. If a fetch
fails, the error names the worker and the samples.
"""

from __future__ import annotations

import errno
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.pin_memory import pin_memory

from lockstep.data.device import Ahead, Copies
from lockstep.data.keyed import IDLE, Keys, listed, worker_setup
from lockstep.errors import LoaderWorkerKilled, LockstepError, UsageError
from lockstep.runtime import status

_PATIENCE_SECONDS = 5.0  # how long to wait for a worker that closed its connections to end
_NATIVE = "Native code crashed: try num_workers=0 under `python -X faulthandler`."
_LIKELY = {
    signal.SIGKILL: "Most likely the host ran out of memory: use fewer num_workers, or make"
    " samples smaller.",
    signal.SIGBUS: "Most likely /dev/shm is full: enlarge it, or use fewer num_workers.",
    signal.SIGSEGV: _NATIVE,
    signal.SIGABRT: _NATIVE,
}


class KeysSampler(Sampler[Keys]):
    """DataLoader's batch sampler: yields the keys of a walk's micro-batches, or the requests of a
    stream. Remembers the keys whose batches have not come back.
    """

    def __init__(self) -> None:
        self.keys: Callable[[], Iterator[Any]] = lambda: iter(())
        self.sent: dict[int, Keys] = {}
        self.received = 0

    def __iter__(self) -> Iterator[Keys]:
        self.sent = {}
        self.received = 0
        return self._counted(self.keys(), self.sent)

    @staticmethod
    def _counted(keys: Iterator[Keys], sent: dict[int, Keys]) -> Iterator[Keys]:
        for number, micro_batch in enumerate(keys):
            sent[number] = micro_batch
            yield micro_batch

    def count_received(self) -> None:
        del self.sent[self.received]
        self.received += 1


class Walk:
    """The batches of one walk.

    torch's persistent workers serve one walk at a time, and a failed fetch loses its batch. So a
    walk ends when a later one begins or when a fetch fails. From then on it raises, because its
    next batches would belong to other slots.

    Args:
        loader: torch's DataLoader.
        sampler: the loader's batch sampler.
        keys: returns an iterator over the keys of the walk's micro-batches, in order.
        epoch: the number of the epoch, for messages.
        rank: this process's rank, for messages.
        copies: how batches reach the device.
        turns: which of the loader's walks may fetch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: KeysSampler,
        keys: Callable[[], Iterator[Any]],
        copies: Copies,
        turns: Turns,
        *,
        epoch: int,
        rank: int,
    ) -> None:
        self._loader = loader
        self._sampler = sampler
        self._epoch = epoch
        self._rank = rank
        self._turns = turns
        self._turn = turns.next()
        self._failed = False
        self.ahead = copies.ahead
        self._copies = copies
        self._ahead = Ahead(copies)
        self._dataset = type(loader.dataset._dataset).__name__  # type: ignore[attr-defined]
        sampler.keys = keys
        if loader.num_workers:
            # here, not in the loader's constructor: the process may have forked since then
            loader.worker_init_fn = worker_setup()
        self._workers = loader.num_workers > 0
        self._batches: Any = _begun(loader, sampler, self._dataset, rank)

    def fetch_ahead(self, count: int) -> None:
        """Fetch batches until `count` of them are on their way to the device."""
        if not self._failed and self._turn == self._turns.now:
            with status.inside("data"):
                self._ahead.fill(count, self._fetch)

    def take(self) -> Any:
        """Return the next batch of this rank, on its device."""
        if self._turn != self._turns.now:
            raise self._late("another epoch was begun, a state loaded or the Loader closed")
        # a Stepper's window has begun the phase
        before = None if status.current == "data" else status.enter("data")
        if self.ahead:
            batch = self._ahead.take(self._fetch)
        else:  # copied when it is asked for
            fetched = self._fetch()
            batch = self._copies.arrive(fetched)
        if before is not None:
            status.enter(before, resumed=True)
        return batch

    def _fetch(self) -> Any:
        if self._failed:
            raise self._late("a sample could not be fetched")
        self._failed = True
        batch = self._from_workers() if self._workers else next(self._batches)
        self._failed = False
        return batch

    def _from_workers(self) -> Any:
        death = self._death()
        if death:
            raise death
        try:
            with _watched(self._batches):
                batch = next(self._batches)
        except Exception as error:
            closed = isinstance(error, (ConnectionError, EOFError))
            if closed and "DataLoader worker process" not in str(error):
                self._await_end()  # a dying worker's shared memory is gone before the worker is
            death = self._death()
            if death:
                raise death from error
            _note_full_memory(error)
            raise
        self._sampler.count_received()
        return batch

    def _late(self, reason: str) -> LockstepError:
        return LockstepError("batches-not-fetched", epoch=self._epoch, why=reason)

    def _death(self) -> LockstepError | None:
        """Return an error if a worker is dead: which one, its cause of death, what it fetched."""
        workers = getattr(self._batches, "_workers", ())
        for number, worker in enumerate(workers):
            if worker.exitcode is None:
                continue
            activity = ""
            samples = self._under_way(number, len(workers))
            if samples:
                activity = f" while it fetched {samples} of {self._dataset} in epoch {self._epoch}"
            end_workers(self._loader)
            method = _start_method()
            if worker.exitcode == 1 and not self._sampler.received and method != "fork":
                return LockstepError(
                    "loader-worker-not-started", rank=self._rank, worker=number, method=method
                )
            return _dead(worker, number, self._rank, activity)
        return None

    def _under_way(self, number: int, workers: int) -> str:
        """Name what worker `number` was fetching: the sample that it noted, or else the first
        micro-batch that has not come from it.
        """
        progress = getattr(self._loader.dataset, "_progress", None)
        if progress is not None:
            return "" if progress[number] == IDLE else f"sample {progress[number]}"
        # batches that have arrived, but must wait for earlier ones
        arrived = getattr(self._batches, "_task_info", {})
        for request in sorted(self._sampler.sent):
            if request % workers == number and len(arrived.get(request, ())) < 2:
                return f"samples {listed(self._sampler.sent[request][1])}"
        return ""

    def _await_end(self) -> None:
        workers = getattr(self._batches, "_workers", ())
        wait([worker.sentinel for worker in workers], timeout=_PATIENCE_SECONDS)


class Turns:
    """A counter of a loader's walks: only the walk that began last may fetch."""

    def __init__(self) -> None:
        self.now = 0

    def next(self) -> int:
        self.now += 1
        return self.now


def end_workers(loader: DataLoader[Any]) -> None:
    """End the workers now; the next walk starts new ones."""
    iterator: Any = loader._iterator
    loader._iterator = None
    if iterator is None:
        return
    # all workers take the lock of this event to check it
    event = getattr(iterator, "_workers_done_event", None)
    if event is not None:
        if event._cond.acquire(timeout=_PATIENCE_SECONDS):
            event._cond.release()
        else:  # a worker was killed while it held the lock, so nobody ever releases it
            for worker in iterator._workers:
                worker.terminate()
                worker.join()
            iterator._workers_done_event = threading.Event()
    iterator._shutdown_workers()  # torch has no public method


def _dead(worker: Any, number: int, rank: int, activity: str) -> LockstepError:
    fields = {"rank": rank, "worker": number, "pid": worker.pid, "what": activity}
    if worker.exitcode >= 0:
        return LockstepError("loader-worker-exited", exitcode=worker.exitcode, **fields)
    cause = -worker.exitcode
    name = f"signal {cause}"
    if cause in signal.valid_signals():
        name = signal.Signals(cause).name
    return LoaderWorkerKilled(
        "loader-worker-killed",
        signal=cause,
        name=name,
        likely=_LIKELY.get(cause, "Lockstep did not send it."),
        **fields,
    )


def _begun(loader: DataLoader[Any], sampler: KeysSampler, name: str, rank: int) -> Any:
    """Start the workers, and return torch's iterator."""
    death = _death_between_epochs(loader, rank)
    if death:
        raise death
    if not loader.num_workers:
        return _here(loader, sampler)
    # The workers share this process's folder for their sockets. A worker that makes its own folder
    # does not remove it when it is killed.
    multiprocessing.util.get_temp_dir()
    try:
        with _watched(loader._iterator):
            iterator: Any = iter(loader)
    except Exception as error:
        death = _death_between_epochs(loader, rank) or _death_at_start(error, rank)
        if death:
            raise death from error
        method = _start_method()
        refusal = None if method == "fork" else _pickle_refusal(loader.dataset)
        if refusal is not None:
            raise UsageError(
                "dataset-not-picklable",
                dataset=name,
                workers=loader.num_workers,
                method=method,
                why=refusal,
            ) from error
        _note_full_memory(error)
        raise
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    return iterator


def _death_between_epochs(loader: DataLoader[Any], rank: int) -> LockstepError | None:
    """Return an error if a worker of the last epoch has died since."""
    death = _first_death(loader._iterator, rank, " between two epochs")
    if death:
        end_workers(loader)
    return death


def _death_at_start(error: Exception, rank: int) -> LockstepError | None:
    """Return an error if a worker died while torch started the workers. Only the traceback leads to
    torch's iterator then.
    """
    for frame, _ in walk_tb(error.__traceback__):
        # not this module's frames: `error` is a variable there, and once read it keeps itself alive
        if frame.f_globals.get("__name__") == DataLoader.__module__:
            death = _first_death(frame.f_locals.get("self"), rank, " as it started")
            if death:
                return death
    return None


def _first_death(iterator: Any, rank: int, activity: str) -> LockstepError | None:
    for number, worker in enumerate(getattr(iterator, "_workers", ())):
        if worker.exitcode is not None:
            return _dead(worker, number, rank, activity)
    return None


def _note_full_memory(error: Exception) -> None:
    """Add a note on /dev/shm to the error if it is full: the errors of torch and the standard
    library name no folder.
    """
    nameless = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if nameless or ("</torch_" in str(error) and os.strerror(errno.ENOSPC) in str(error)):
        error.add_note(f"Loader workers send batches through /dev/shm. {_LIKELY[signal.SIGBUS]}")


def _here(loader: DataLoader[Any], sampler: KeysSampler) -> Iterator[Any]:
    """Yield batches as DataLoader does without workers, but without its cost for each batch."""
    batches = map(loader.dataset.__getitems__, sampler.keys())  # type: ignore[attr-defined]
    if loader.pin_memory and torch.accelerator.is_available():
        return map(pin_memory, batches)
    return batches


def _start_method() -> str:
    return str(torch.multiprocessing.get_start_method())


def _pickle_refusal(keyed: Any) -> str | None:
    """Return why the data set cannot be pickled; None if it can."""
    try:
        ForkingPickler.dumps((keyed._dataset, keyed._collate))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _watched(iterator: Any) -> Iterator[None]:
    """Tell torch which workers to watch, only while this thread waits for a batch.

    torch raises a worker's death from a signal handler, wherever this thread is: also in the user's
    backward, without naming the worker. A worker that died in between is found by `_death`.
    """
    workers = getattr(iterator, "_workers", None)
    if not workers:
        yield
        return
    signal_handling._set_worker_pids(id(iterator), tuple(worker.pid for worker in workers))
    iterator._worker_pids_set = True
    try:
        yield
    finally:
        if iterator._worker_pids_set:
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
