"""The Loader: the same micro-batches whatever the world size and the number of loader workers,
none padded, lost or repeated.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
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
from tests.data.datasets import (
    AtOnce,
    Augmented,
    Broken,
    Numbers,
    Pairs,
    Stream,
    WorkerPids,
    with_draws,
)
from tests.ending import end, wait_gone
from tests.refused import refused
from tests.teams import on_team


def loader(dataset: Any, *, rank: int = 0, size: int | None = 1, **options: Any) -> Loader:
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
    """(epoch, step, slot) -> the batch, over all ranks. The process's random state stays."""
    found: dict[tuple[int, int, int], Any] = {}
    before = torch.get_rng_state()
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
    assert torch.equal(torch.get_rng_state(), before)
    return found


def test_world_size_balance_and_workers_change_no_batch() -> None:
    equal = [(3, 0, None), (5, 0, None), (1, 1, None), (2, 2, None)]
    for dataset, collate in ((Augmented(21), None), (AtOnce(21), with_draws)):
        expected = by_slot(1, dataset, collate_fn=collate)
        assert len(expected) == 2 * (4 + 4 + 3)  # steps of 8, 8 and 5 samples
        for size, workers, balance in [*equal, (2, 2, "1,3"), (2, 1, "4,0")]:
            options = {"collate_fn": collate, "num_workers": workers, "balance": balance}
            assert by_slot(size, dataset, **options) == expected, (size, workers, balance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1, "collate_fn": with_draws},
        {"order": Pairs(), "micro_batches": 2, "global_batch": None, "micro_batch": None},
        {"order": list(range(20, -1, -1))},
    ],
)
def test_any_window_has_the_batches_of_the_training(options: dict[str, Any]) -> None:
    expected = by_slot(1, Augmented(21), **options)
    windows: dict[tuple[int, int, int], Any] = {}
    for rank in range(3):
        ours = loader(Augmented(21), rank=rank, size=3, **options)
        walk = iter(next(ours.epochs(1)))
        next(walk)
        state = ours.state_dict()
        for epoch in (1, 0):  # also while a walk is under way
            steps = ours.batch_plan.plan(epoch).steps_per_epoch
            for step in reversed(range(steps)):
                window = ours.window(epoch, step)
                assert (window.epoch, len(window.slots)) == (epoch, len(window.counts))
                for slot, batch in zip(window.slots, window, strict=True):
                    windows[epoch, window.step, slot] = as_data(batch)
        assert ours.state_dict() == state
        second = next(walk)
        for slot, batch in zip(second.slots, second, strict=True):
            assert as_data(batch) == expected[0, 1, slot]
        ours.close()
    assert windows == expected


def test_the_indices_of_any_step() -> None:
    ours = loader(Numbers(21), rank=2, size=3)
    for epoch in ours.epochs(2):
        for index, window in enumerate(epoch):
            batches = ours.indices(epoch.number, index)
            assert sum(map(len, batches)) == (8, 8, 5)[index]
            for slot, batch in zip(window.slots, window, strict=True):
                assert batches[slot] == as_data(batch)
    for step in (3, -1):
        with refused("wrong-value", name="step", value=step):
            ours.window(1, step)
    with refused("wrong-value", name="epoch", value=-1):
        ours.indices(-1, 0)


def test_epochs_begin_where_asked() -> None:
    ours = loader(Numbers(8))
    assert [epoch.number for epoch in ours.epochs(3)] == [0, 1, 2]
    assert [epoch.number for epoch in ours.epochs(5, start=3)] == [3, 4]
    assert list(ours.epochs(2, start=2)) == []
    assert [len(loader(Numbers(10), drop_last=drop)) for drop in (False, True)] == [2, 1]
    assert [window.step for epoch in ours.epochs(5, start=3) for window in epoch] == [3, 4]
    for arguments, name in (((-1,), "count"), ((3, -1), "start"), ((2.5,), "count")):
        with refused("wrong-value", name=name, value=arguments[-1]):
            ours.epochs(*arguments)


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


@pytest.mark.parametrize("workers", [0, 2])
def test_walking_otherwise_than_to_the_end_moves_no_batch(workers: int) -> None:
    expected = by_slot(1, Augmented(21))
    ours = loader(Augmented(21), num_workers=workers)
    for _ in range(2):  # epochs left half way
        for window in Epoch(ours, 0):
            assert as_data(window[0]) == expected[0, window.step, 0]
            break
    for number, window in enumerate(Epoch(ours, 0)):  # windows left half way
        for place, batch in enumerate(window):
            assert as_data(batch) == expected[0, window.step, window.slots[place]]
            if place == number:
                break
    for window in list(Epoch(ours, 1)):  # windows kept until after their epoch
        assert as_data(list(window)) == [expected[1, window.step, slot] for slot in window.slots]
    why = "another epoch was begun, a state loaded or the Loader closed"
    earlier = next(iter(Epoch(ours, 0)))
    assert as_data(earlier[0]) == expected[0, 0, 0]
    later = next(iter(Epoch(ours, 1)))
    with refused("batches-not-fetched", LockstepError, epoch=0, why=why):
        list(earlier)
    assert as_data(earlier[0]) == expected[0, 0, 0]
    assert as_data(list(later)) == [expected[1, 3, slot] for slot in later.slots]
    last = next(iter(Epoch(ours, 1)))
    ours.close()
    with refused("batches-not-fetched", LockstepError, epoch=1, why=why):
        list(last)


def pids(epoch: Epoch) -> set[int]:
    return {pid for window in epoch for batch in window for pid in batch.tolist()}


def test_workers_stay_until_their_loader_is_closed_or_gone() -> None:
    before = set(psutil.Process().children())
    ours = loader(WorkerPids(32), num_workers=2)
    first = pids(Epoch(ours, 0))
    assert len(first) == 2
    assert 0 not in first
    assert pids(Epoch(ours, 1)) == pids(Epoch(ours, 2)) == first
    ours.close()
    ours.close()
    assert set(psutil.Process().children()) == before
    second = pids(Epoch(ours, 3))
    assert len(second) == 2
    assert not first & second
    del ours
    gc.collect()
    assert set(psutil.Process().children()) == before


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
def test_workers_die_with_their_rank_even_while_they_fetch() -> None:
    script = textwrap.dedent("""
        from lockstep import Loader
        from tests.data.datasets import Sleeping
        list(next(iter(next(Loader(Sleeping(4), global_batch=4, num_workers=1).epochs(1)))))
    """)
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    rank = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        worker = psutil.Process(int(rank.stdout.readline()))
        assert worker.ppid() == rank.pid
        rank.kill()
        wait_gone([worker], 60)
    finally:
        end(rank)


def test_sizes_that_follow_the_world_size_say_so() -> None:
    free = loader(Numbers(100), size=4)
    assert not free.depends_on_world_size
    assert free.describe() == "global batch 8 = 4 micro-batches x 2; 4 ranks x 1"
    one_each = loader(Numbers(100), size=3, micro_batch=None)
    assert one_each.depends_on_world_size
    line = "global batch 8 = 3 micro-batches x 3, the last 2; 3 ranks x 1"
    assert one_each.describe() == f"{line} (this recipe depends on the world size)"
    few = loader(Numbers(100), size=9, global_batch=4, micro_batch=None)
    assert few.describe().startswith("global batch 4 = 4 micro-batches x 1; 9 ranks: 4 x 1, 5 idle")
    for options, sizes in (({}, (24, 8, 3)), ({"micro_batch": 4}, (24, 4, 6))):
        weak = loader(Numbers(100), size=3, batch_per_rank=8, **options)
        assert weak.depends_on_world_size
        assert (weak.plan.global_batch, weak.plan.micro_batch, weak.plan.slots) == sizes


def by_default(world: lockstep.World) -> tuple[int, int, list[Any]]:
    ours = Loader(Numbers(8), global_batch=8, micro_batch=2, shuffle=False, num_workers=1)
    batches = [as_data(batch) for window in next(ours.epochs(1)) for batch in window]
    ours.close()
    return ours.rank, ours.size, batches


def test_ranks_come_from_the_process_group() -> None:
    assert on_team(by_default, 2) == [(0, 2, [[0, 1], [2, 3]]), (1, 2, [[4, 5], [6, 7]])]


def test_mistakes_are_named() -> None:
    numbers = Numbers(10)
    with refused("empty-dataset"):
        loader([])
    with refused("not-a-loaders-dataset", what="int"):
        loader(5)
    with refused("numbers-of-stream", name="shuffle", value=True, dataset="Stream"):
        loader(Stream(), shuffle=True)
    with refused("numbers-of-stream", name="order", dataset="Stream"):
        loader(Stream(), order=range(3))
    with refused("sharding-of-samples", sharding="items", dataset="Numbers"):
        loader(numbers, sharding="items")
    with refused("not-one-batch-size", global_batch=8, batch_per_rank=4):
        loader(numbers, batch_per_rank=4, global_batch=8)
    with refused("micro-batch-too-large", micro_batch=9, global_batch=8):
        loader(numbers, micro_batch=9)
    with refused("wrong-value", name="batch_per_rank", value=0):
        loader(numbers, batch_per_rank=0)
    with refused("not-a-multiple", name="batch_per_rank", value=8, micro_batch=3):
        loader(numbers, batch_per_rank=8, micro_batch=3)
    with refused("wrong-value", name="num_workers", value=-1):
        loader(numbers, num_workers=-1)
    with refused("wrong-value", name="seed", value=0.5):
        loader(numbers, seed=0.5)
    with refused("no-such-rank", rank=2, size=2):
        loader(numbers, rank=2, size=2)
    with refused("rank-or-size-missing", rank=0, size=None):
        loader(numbers, rank=0, size=None)


def test_an_iterable_dataset_gives_a_stream_loader() -> None:
    found = Loader(Stream(), global_batch=4, micro_batch=2, device="cpu")
    assert isinstance(found, StreamLoader)
    assert found.describe().endswith("an iterable dataset, sharded by the loader")
    for read in (found.window, found.indices):
        with refused("window-of-stream", dataset="Stream"):
            read(0, 0)
