"""The Loader: the same micro-batches whatever the world size and the number of loader workers,
none padded, lost or repeated.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data.iterable.stream_loader import StreamLoader
from lockstep.data.loader import Epoch, Loader
from lockstep.errors import LockstepError
from tests.data.datasets import AtOnce, Augmented, Broken, Numbers, Stream, WorkerPids, with_draws
from tests.ending import alive
from tests.refused import refused
from tests.teams import on_team


def loader(dataset: Any, *, rank: int = 0, size: int = 1, **options: Any) -> Loader:
    defaults = {"global_batch": 8, "micro_batch": 2, "device": "cpu"}
    if "batch_per_rank" in options:
        del defaults["global_batch"], defaults["micro_batch"]
    return Loader(dataset, rank=rank, size=size, **(defaults | options))


def as_data(batch: Any) -> Any:
    """Tensors as tuples, so that batches can be compared."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_data(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def by_slot(
    size: int, dataset: Any, epochs: int = 2, **options: Any
) -> dict[tuple[int, int, int], Any]:
    """(epoch, step, slot) -> the batch, over all ranks."""
    found: dict[tuple[int, int, int], Any] = {}
    for rank in range(size):
        for epoch in loader(dataset, rank=rank, size=size, **options).epochs(epochs):
            for window in epoch:
                for slot, positions, batch in zip(
                    window.slots, window.positions, window, strict=True
                ):
                    assert (window.epoch, slot in window.cut.share(rank, size)) == (
                        epoch.number,
                        True,
                    )
                    assert positions == window.cut.positions(slot)
                    assert (epoch.number, window.step, slot) not in found
                    found[epoch.number, window.step, slot] = as_data(batch)
    return found


@pytest.mark.parametrize("dataset", [Augmented(21), AtOnce(21)], ids=["samples", "at once"])
@pytest.mark.parametrize("collate", [None, with_draws], ids=["collate", "random collate"])
def test_world_size_and_workers_change_no_batch(dataset: Any, collate: Any) -> None:
    expected = by_slot(1, dataset, collate_fn=collate)
    assert len(expected) == 2 * (4 + 4 + 3)  # steps of 8, 8 and 5 samples
    for size, workers in ((3, 0), (5, 0), (1, 1), (2, 2)):
        slots = by_slot(size, dataset, collate_fn=collate, num_workers=workers)
        assert slots == expected, (size, workers)


@pytest.mark.parametrize("drop_last", [False, True])
def test_all_ranks_have_equally_many_windows_also_idle_ones(drop_last: bool) -> None:
    ranks = [loader(Numbers(10), rank=rank, size=6, drop_last=drop_last) for rank in range(6)]
    windows = [[len(window) for window in next(rank.epochs(1))] for rank in ranks]
    if drop_last:
        assert windows == [[1]] * 4 + [[0]] * 2
    else:
        assert windows == [[1, 1]] + [[1, 0]] * 3 + [[0, 0]] * 2
    assert {len(rank) for rank in ranks} == {2 - drop_last}


def test_epochs_begin_where_asked() -> None:
    ours = loader(Numbers(8))
    assert [epoch.number for epoch in ours.epochs(3)] == [0, 1, 2]
    assert [epoch.number for epoch in ours.epochs(5, start=3)] == [3, 4]
    assert list(ours.epochs(2, start=2)) == []
    assert [window.step for epoch in ours.epochs(5, start=3) for window in epoch] == [3, 4]
    for arguments, name in (((-1,), "count"), ((3, -1), "start"), ((2.5,), "count")):
        with refused("wrong-value", name=name, value=arguments[-1]):
            ours.epochs(*arguments)


# -- what a batch may be -------------------------------------------------------------------------


def test_batches_arrive_on_the_device() -> None:
    dataset = TensorDataset(torch.arange(8), torch.arange(8.0))
    window = next(iter(next(loader(dataset, device="meta").epochs(1))))
    assert {tensor.device.type for batch in window for tensor in batch} == {"meta"}


def test_nothing_is_pinned_without_a_gpu() -> None:
    assert not loader(Numbers(8))._loader.pin_memory
    assert Loader(Numbers(8), global_batch=8).device.type == (
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    assert loader(Numbers(8), device="cuda:0")._loader.pin_memory
    assert not loader(Numbers(8), device="cuda:0", pin_memory=False)._loader.pin_memory


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    for workers in (0, 1):
        for epoch in loader(Augmented(9), num_workers=workers).epochs(2):
            for window in epoch:
                list(window)
    assert torch.equal(torch.get_rng_state(), before)


# -- walking it otherwise than in order ----------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_window_left_half_way_moves_nothing(workers: int) -> None:
    expected = by_slot(1, Augmented(21), num_workers=workers)
    for epoch in loader(Augmented(21), num_workers=workers).epochs(2):
        for number, window in enumerate(epoch):
            for place, batch in enumerate(window):
                assert as_data(batch) == expected[epoch.number, window.step, window.slots[place]]
                if place == number:
                    break


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_can_be_kept_and_walked_after_their_epoch(workers: int) -> None:
    ours = loader(Numbers(21), num_workers=workers)
    windows = list(next(ours.epochs(1)))
    slots = {
        (0, window.step, slot): as_data(batch)
        for window in windows
        for slot, batch in zip(window.slots, window, strict=True)
    }
    assert slots == by_slot(1, Numbers(21), epochs=1)
    ours.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_left_half_way_does_not_disturb_the_next(workers: int) -> None:
    expected = by_slot(1, Augmented(21))
    ours = loader(Augmented(21), num_workers=workers)
    for _ in range(2):
        for window in Epoch(ours, 0):
            assert as_data(window[0]) == expected[0, window.step, 0]
            break
    for window in Epoch(ours, 1):
        assert as_data(list(window)) == [expected[1, window.step, slot] for slot in window.slots]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_later_walk_ends_an_earlier_one(workers: int) -> None:
    ours = loader(Numbers(16), num_workers=workers, shuffle=False)
    earlier = iter(Epoch(ours, 0))
    old = next(earlier)
    assert as_data(old[0]) == [0, 1]
    new = next(iter(Epoch(ours, 1)))
    why = "another epoch was begun, a state loaded or the Loader closed"
    with refused("batches-not-fetched", LockstepError, epoch=0, why=why):
        list(old)
    assert as_data(old[0]) == [0, 1]
    assert as_data(list(new)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# -- workers -------------------------------------------------------------------------------------


def test_workers_stay_from_epoch_to_epoch_and_go_with_the_loader() -> None:
    ours = loader(WorkerPids(32), num_workers=2)
    pids = [
        {pid for window in epoch for batch in window for pid in batch.tolist()}
        for epoch in ours.epochs(3)
    ]
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 2
    assert 0 not in pids[0]
    del ours
    gc.collect()
    assert not any(alive(pid) for pid in pids[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_ends_the_workers_and_a_later_epoch_starts_others(workers: int) -> None:
    ours = loader(WorkerPids(32), num_workers=workers)
    before = set(psutil.Process().children())
    window = next(iter(Epoch(ours, 0)))
    assert len(window[0]) == 2
    assert len(set(psutil.Process().children()) - before) == workers
    ours.close()
    ours.close()
    assert set(psutil.Process().children()) == before
    with refused("batches-not-fetched", LockstepError) as caught:
        list(window)
    assert "or the Loader closed" in caught.value.values["why"]
    assert sum(len(batch) for later in Epoch(ours, 1) for batch in later) == 32
    ours.close()


def test_a_rank_that_never_has_samples_starts_no_workers() -> None:
    for samples, rank, balance in ((32, 4, None), (2, 1, None), (32, 0, "0,1,0,0,0")):
        # no slot; a slot that the only, short step leaves empty; no share
        ours = loader(Numbers(samples), rank=rank, size=5, num_workers=2, balance=balance)
        before = set(psutil.Process().children())
        assert sum(map(len, next(ours.epochs(1)))) == 0
        assert set(psutil.Process().children()) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_shows_the_users_own_error(workers: int) -> None:
    ours = loader(Broken(16, bad=5), num_workers=workers, shuffle=False)
    epoch = iter(next(ours.epochs(1)))
    window = next(epoch)
    assert as_data(window[1]) == [2, 3]
    with pytest.raises(KeyError) as caught:
        window[2]
    text = (
        str(caught.value)
        if workers
        else f"{caught.traceback[-1].statement} {caught.value} {caught.value.__notes__}"
    )
    for part in ("raise KeyError(", "the user's own error", "sample 5 of Broken, in epoch 0"):
        assert part in text
    why = "a sample could not be fetched"
    with refused("batches-not-fetched", LockstepError, why=why):
        window[2]  # and not slot 3's samples
    with refused("batches-not-fetched", LockstepError, why=why):
        next(epoch)
    assert as_data(next(iter(Epoch(ours, 1)))[0]) == [0, 1]
    ours.close()  # the caught error keeps the Loader


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel cannot be asked to do it")
def test_workers_die_with_their_rank_even_while_they_fetch(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = textwrap.dedent(f"""
        from pathlib import Path
        from lockstep import Loader
        from tests.data.datasets import Sleeping
        list(next(iter(next(Loader(Sleeping(4, Path({str(file)!r})), global_batch=4, num_workers=1).epochs(1)))))
    """)
    rank = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        until(file.exists)
        worker = psutil.Process(int(file.read_text()))
        assert worker.ppid() == rank.pid
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
        until(lambda: not alive(worker))
    finally:
        rank.kill()
        rank.wait()


def until(happened: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# -- sizes and places ----------------------------------------------------------------------------


def test_sizes_that_follow_the_world_size_say_so() -> None:
    free = loader(Numbers(100), size=4)
    assert (free.depends_on_world_size, free.describe()) == (
        False,
        "global batch 8 = 4 micro-batches x 2; 4 ranks x 1",
    )
    one_each = loader(Numbers(100), size=3, micro_batch=None)
    assert one_each.depends_on_world_size
    assert (
        one_each.describe()
        == "global batch 8 = 3 micro-batches x 3, the last 2; 3 ranks x 1 (this recipe depends on"
        " the world size)"
    )
    weak = loader(Numbers(100), size=3, batch_per_rank=8)
    assert (
        weak.depends_on_world_size,
        weak.plan.global_batch,
        weak.plan.micro_batch,
        weak.plan.slots,
    ) == (True, 24, 8, 3)
    cut = loader(Numbers(100), size=3, batch_per_rank=8, micro_batch=4)
    assert (cut.plan.micro_batch, cut.plan.slots) == (4, 6)
    few = loader(Numbers(100), size=9, global_batch=4, micro_batch=None)
    assert few.describe().startswith("global batch 4 = 4 micro-batches x 1; 9 ranks: 4 x 1, 5 idle")


def by_default(world: lockstep.World) -> tuple[int, int, list[Any]]:
    ours = Loader(Numbers(8), global_batch=8, micro_batch=2, shuffle=False, num_workers=1)
    batches = [as_data(batch) for window in next(ours.epochs(1)) for batch in window]
    ours.close()
    return ours.rank, ours.size, batches


def test_ranks_come_from_the_process_group() -> None:
    assert on_team(by_default, 2) == [(0, 2, [[0, 1], [2, 3]]), (1, 2, [[4, 5], [6, 7]])]


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"dataset": []}, "empty-dataset", {}),
        ({"dataset": 5}, "not-a-loaders-dataset", {"what": "int"}),
        (
            {"dataset": Stream(), "shuffle": True},
            "numbers-of-stream",
            {"name": "shuffle", "value": True, "dataset": "Stream"},
        ),
        (
            {"dataset": Stream(), "order": range(3)},
            "numbers-of-stream",
            {"name": "order", "dataset": "Stream"},
        ),
        ({"sharding": "items"}, "sharding-of-samples", {"sharding": "items", "dataset": "Numbers"}),
        (
            {"batch_per_rank": 4, "global_batch": 8},
            "not-one-batch-size",
            {"global_batch": 8, "batch_per_rank": 4},
        ),
        ({"micro_batch": 9}, "micro-batch-too-large", {"micro_batch": 9, "global_batch": 8}),
        (
            {"global_batch": "8", "micro_batch": None},
            "wrong-value",
            {"name": "global_batch", "value": "8"},
        ),
        ({"batch_per_rank": 0}, "wrong-value", {"name": "batch_per_rank", "value": 0}),
        (
            {"batch_per_rank": 8, "micro_batch": 3},
            "not-a-multiple",
            {"name": "batch_per_rank", "value": 8, "micro_batch": 3},
        ),
        ({"num_workers": -1}, "wrong-value", {"name": "num_workers", "value": -1}),
        ({"seed": 0.5}, "wrong-value", {"name": "seed", "value": 0.5}),
        ({"rank": 2, "size": 2}, "no-such-rank", {"rank": 2, "size": 2}),
        ({"rank": 0, "size": None}, "rank-or-size-missing", {"rank": 0, "size": None}),
        ({"drop_last": True, "global_batch": 64}, "only-step-dropped", {}),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], code: str, values: dict[str, Any]) -> None:
    dataset = options.pop("dataset", Numbers(10))
    with refused(code, **values):
        loader(dataset, **options)


def test_an_iterable_dataset_gives_a_loader_with_the_same_face() -> None:
    found = Loader(Stream(), global_batch=4, micro_batch=2, device="cpu")
    assert isinstance(found, StreamLoader)
    assert {name for name in dir(Loader) if not name.startswith("_")} - {
        "plan",
        "order",
        "by_rank",
        "share",
    } <= set(dir(found))
    assert found.describe().endswith("an iterable dataset, sharded by the loader")
