"""When no batch comes: which worker, of what, at which samples; and whose turn it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch.multiprocessing
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lockstep.data.loader import Epoch, Loader
from lockstep.errors import LockstepError
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.data.datasets import Lambda, Leaving, Numbers, WorkerPids, as_list
from tests.refused import refused


def loader(dataset: Any, **options: Any) -> Loader:
    """Batches are lists: a worker that is killed while it sends a tensor leaves shared memory
    behind.
    """
    place = {"device": "cpu", "rank": 1, "size": 2}
    sizes = {"global_batch": 8, "micro_batch": 2, "shuffle": False, "collate_fn": as_list}
    return Loader(dataset, **(place | sizes | options))


def everything(ours: Loader, number: int = 0) -> list[int]:
    return [sample for window in Epoch(ours, number) for batch in window for sample in batch]


@pytest.mark.parametrize(
    ("end", "code", "values"),
    [
        ({"signal": signal.SIGSEGV}, "loader-worker-killed", {"name": "SIGSEGV"}),
        ({"code": 3}, "loader-worker-exited", {"exitcode": 3}),
    ],
)
def test_a_worker_that_dies_is_named_with_its_samples(
    end: dict[str, int], code: str, values: dict[str, Any]
) -> None:
    dataset = Leaving(32, bad=15, **end)
    ours = loader(dataset, num_workers=2)
    what = " while it fetched sample 15 of Leaving in epoch 0"
    with refused(code, LockstepError, **values, rank=1, worker=1, what=what):
        everything(ours)
    dataset.bad = -1
    assert everything(loader(dataset, num_workers=2)) == everything(loader(dataset))
    ours.close()


def test_a_worker_that_dies_between_two_fetches_or_epochs_is_named_in_the_next_one() -> None:
    ours = loader(WorkerPids(64), num_workers=1)
    epoch = iter(Epoch(ours, 0))
    (worker,) = {pid for batch in next(epoch) for pid in batch}
    os.kill(worker, signal.SIGKILL)
    ours._loader._iterator._workers[0].join()  # type: ignore[union-attr]  # torch's own handler would raise here
    with refused("loader-worker-killed", LockstepError, rank=1, worker=0, pid=worker):
        next(iter(next(epoch)))
    for early in (True, False):
        before, (worker,) = worker, set(everything(ours, 1))  # another was started
        assert worker != before
        os.kill(worker, signal.SIGSTOP)  # it does not answer that it is ready
        killing = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
        killing.start()
        if early:  # before the next epoch begins, not as it does
            ours._loader._iterator._workers[0].join()  # type: ignore[union-attr]
        said = {"pid": worker, "name": "SIGKILL", "what": " between two epochs"}
        with refused("loader-worker-killed", LockstepError, **said):
            next(iter(Epoch(ours, 1)))
        killing.join()
    assert worker not in everything(ours, 1)
    ours.close()


def begins_with_a_worker_that_dies(world: World) -> None:
    def killed(iterator: Any) -> None:
        iterator._workers[1].kill()
        while True:  # until torch's handler raises
            time.sleep(0.01)

    ours = loader(WorkerPids(64), num_workers=2)
    said = {"worker": 1, "name": "SIGKILL", "what": " as it started"}
    with (
        patch.object(_MultiProcessingDataLoaderIter, "_try_put_index", killed),
        refused("loader-worker-killed", LockstepError, **said),
    ):
        next(iter(Epoch(ours, 0)))


def test_a_worker_that_dies_while_the_workers_start_is_named() -> None:
    """On a rank of its own: it leaves torch's half-made iterator."""
    run_ranks(begins_with_a_worker_that_dies, 1)


def test_a_worker_that_died_with_the_lock_that_all_share_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.data.walk._PATIENCE_SECONDS", 0.2)
    ours = loader(WorkerPids(64), num_workers=2)
    epoch = iter(Epoch(ours, 0))
    worker = next(iter(next(epoch)))[0]
    assert ours._loader._iterator._workers_done_event._cond.acquire(timeout=5)  # type: ignore[union-attr]  # as the one that is killed now had it
    os.kill(worker, signal.SIGKILL)
    next(each for each in ours._loader._iterator._workers if each.pid == worker).join()  # type: ignore[union-attr]
    with refused("loader-worker-killed", LockstepError, pid=worker, name="SIGKILL"):
        list(epoch)
    assert worker not in everything(ours, 1)
    ours.close()


def test_a_dataset_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("spawn", "forkserver"):
        monkeypatch.setattr(torch.multiprocessing, "get_start_method", lambda method=method: method)
        ours = loader(Lambda(32), num_workers=1)
        ours._loader.multiprocessing_context = method
        said = {"dataset": "Lambda", "workers": 1, "method": method}
        with refused("dataset-not-picklable", **said) as caught:
            everything(ours)
        assert "lambda" in caught.value.values["why"]
    monkeypatch.undo()  # where workers are forked, nothing is pickled
    assert len(everything(loader(Lambda(32), num_workers=1, size=1, rank=0))) == 32


class Full(Numbers):
    """What torch raises in a worker that finds no room for a batch."""

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device"
            " (28)"
        )


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_full_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = loader(Full(32), num_workers=1)
    with pytest.raises(RuntimeError) as caught:
        everything(ours)
    ours.close()
    # of a queue, before a worker is started
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", no_room)
    with pytest.raises(OSError, match="No space left") as nameless:
        everything(loader(Numbers(32), num_workers=1))
    for error in (caught.value, nameless.value):
        assert "/dev/shm is full" in error.__notes__[-1]
