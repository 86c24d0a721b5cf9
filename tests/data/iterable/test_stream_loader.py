"""The StreamLoader: nothing lost or twice, no rank left waiting, and with "items" the same steps
at any number of ranks and workers.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data.iterable.stream_loader import StreamLoader
from lockstep.errors import (
    LoaderWorkerKilled,
    LockstepError,
    LockstepWarning,
    PeerFailed,
    UsageError,
    WorkerFailed,
)
from lockstep.gradients.exact import check_window
from lockstep.step.stepper import Stepper
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.refused import refused


class Numbers(IterableDataset[Any]):
    """0, 1, 2, ... after a hundred times the epoch, with what the three libraries draw."""

    def __init__(self, samples: int, draws: bool = False) -> None:
        self.samples, self.draws, self.epoch = samples, draws, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            value = 100 * self.epoch + number
            drawn = (
                torch.rand(()).item() + np.random.rand() + random.random() if self.draws else 0.0
            )
            yield (value, drawn) if self.draws else value


class SplitsByWorker(Numbers):
    """As the documentation of torch's IterableDataset has it."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return iter(range(self.samples)[rank * workers + worker :: size * workers])


class SharesItsEpoch(SplitsByWorker):
    """As Hugging Face's do: all workers have one, and add to it what is missing. This one takes
    its time between the two.
    """

    def __init__(self, samples: int) -> None:
        self.samples, self._epoch = samples, torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        missing = epoch - self._epoch
        time.sleep(0.2)
        self._epoch += missing

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield 100 * int(self._epoch) + number


class Wraps(IterableDataset[Any]):
    def __init__(self, dataset: SharesItsEpoch) -> None:
        self.inner, self.set_epoch = dataset, dataset.set_epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


class Own(IterableDataset[Any]):
    """Rank r has `counts[r]` samples, 100 r, 100 r + 1, ...; its workers take turns."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.rank = counts, 0

    def shard(self, rank: int, size: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(
            range(100 * self.rank, 100 * self.rank + self.counts[self.rank])[worker::workers]
        )


class Stateful(Numbers):
    """Says where it is, and how many items were read by a process."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, draws=True)
        self.at = self.read = 0
        self.loaded: int | None = None

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["at"]

    def __iter__(self) -> Iterator[Any]:
        self.at, self.loaded = self.loaded or 0, None
        while self.at < self.samples:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.at - 1 + 100 * self.epoch, torch.rand(()).item()


class CountsForItsOwnLoader(Numbers):
    """As mosaicml's StreamingDataset: its methods of these names are called by its own loader,
    with what that has counted.
    """

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"sample": num_samples, "from_beginning": from_beginning}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


class Raises(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield from range(5)
        raise OSError("the disk is gone")


class Dies(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)


def loader(dataset: Any, **options: Any) -> StreamLoader:
    if "batch_per_rank" not in options:
        options = {"global_batch": 8, "micro_batch": 2} | options
    return StreamLoader(dataset, device="cpu", **options)


def data(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [data(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


Seen = dict[tuple[int, int, int], Any]


def walked(ours: StreamLoader, epochs: int, start: int | None = None) -> Seen:
    """(epoch, step, slot) -> the batch."""
    found: Seen = {}
    for epoch in ours.epochs(epochs, start):
        for window in epoch:
            found |= {
                (window.epoch, window.step, slot): data(batch)
                for slot, batch in zip(window.slots, window, strict=True)
            }
            assert window.counts == [len(places) for places in window.positions]
    return found


def on_rank(
    world: World, dataset: Any, epochs: int, options: dict[str, Any]
) -> tuple[Seen, list[int]]:
    """What a rank sees, and the number of its samples in every window."""
    ours = loader(dataset, **options)
    samples = [window.samples for epoch in ours.epochs(epochs) for window in epoch]
    found = walked(ours, epochs)
    ours.close()
    return found, samples


def everywhere(
    size: int, dataset: Any, epochs: int = 1, **options: Any
) -> list[tuple[Seen, list[int]]]:
    if size == 1:
        return [on_rank(None, dataset, epochs, options)]  # type: ignore[arg-type]
    return run_ranks(on_rank, size, args=(dataset, epochs, options))


def together(ranks: list[tuple[Seen, list[int]]]) -> Seen:
    assert len({len(samples) for _, samples in ranks}) == 1, "not equally many windows"
    joined = {key: batch for found, _ in ranks for key, batch in found.items()}
    assert len(joined) == sum(len(found) for found, _ in ranks), "a slot came twice"
    return joined


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (1, 2), (2, 0), (3, 2), (8, 0)])
def test_items_are_cut_alike_at_any_number_of_ranks_and_workers(size: int, workers: int) -> None:
    expected = together(everywhere(1, Numbers(21, draws=True), epochs=2))
    assert len(expected) == 2 * (4 + 4 + 3)
    assert [batch[0] for key, batch in sorted(expected.items()) if key[0] == 1][:2] == [
        [100, 101],
        [102, 103],
    ]
    assert (
        together(everywhere(size, Numbers(21, draws=True), epochs=2, num_workers=workers))
        == expected
    )


def test_fewer_items_than_ranks_and_ranks_without_a_share() -> None:
    ranks = everywhere(8, Numbers(3))
    assert [samples for _, samples in ranks] == [[2], [1], *[[0]] * 6]


@pytest.mark.parametrize("drop_last", [False, True])
def test_drop_last_drops_on_all_ranks(drop_last: bool) -> None:
    ranks = everywhere(2, Numbers(13), drop_last=drop_last)
    assert [samples for _, samples in ranks] == ([[4], [4]] if drop_last else [[4, 4], [4, 1]])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_shards_itself_by_worker_loses_nothing_either_way(workers: int) -> None:
    for sharding in ("items", "dataset"):
        found = together(
            run_ranks(
                on_rank_quietly,
                2,
                args=(SplitsByWorker(21), {"num_workers": workers, "sharding": sharding}),
            )
        )
        assert sorted(number for batch in found.values() for number in batch) == list(range(21)), (
            sharding
        )


def on_rank_quietly(world: World, dataset: Any, options: dict[str, Any]) -> tuple[Seen, list[int]]:
    with told(world, options):
        return on_rank(world, dataset, 1, options)


def told(world: World, options: dict[str, Any]) -> AbstractContextManager[Any]:
    """Rank 0 says that the order depends on the number of ranks."""
    says = options.get("sharding") == "dataset" and world.rank == 0
    return (
        pytest.warns(LockstepWarning, match="depends on the number of ranks")
        if says
        else nullcontext()
    )


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_rank_that_is_dry_has_empty_windows_until_all_are(workers: int) -> None:
    counts = [3, 17, 0]
    ranks = run_ranks(
        on_rank_quietly,
        3,
        args=(Own(counts), {"batch_per_rank": 2, "num_workers": workers, "sharding": "dataset"}),
    )
    found = [sorted(number for batch in seen.values() for number in batch) for seen, _ in ranks]
    assert found == [
        [100 * rank + number for number in range(count)] for rank, count in enumerate(counts)
    ]
    assert ranks[2][1] == [0] * 9
    assert sum(ranks[0][1][2:]) == 0


def test_drop_last_of_own_streams_stops_at_the_first_that_is_not_full() -> None:
    options = {"batch_per_rank": 2, "sharding": "dataset", "drop_last": True}
    ranks = run_ranks(on_rank_quietly, 2, args=(Own([5, 17]), options))
    assert [samples for _, samples in ranks] == [[2, 2], [2, 2]]


def test_world_size_is_said_once() -> None:
    said = run_ranks(
        warnings_of, 2, args=(Own([4, 4]), {"batch_per_rank": 2, "sharding": "dataset"})
    )
    assert [len(each) for each in said] == [1, 0]
    assert "order of Own depends on the number of ranks" in said[0][0]


def warnings_of(world: World, dataset: Any, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = loader(dataset, **options)
        walked(ours, 2)
    assert ours.depends_on_world_size
    return [str(warning.message) for warning in caught if warning.category is LockstepWarning]


# -- resume --------------------------------------------------------------------------------------


def stopped(dataset: Any, after: int, **options: Any) -> dict[str, Any]:
    """The state after some windows of two epochs."""
    ours = loader(dataset, **options)
    for _, _window in zip(
        range(after), (window for epoch in ours.epochs(2) for window in epoch), strict=False
    ):
        state = ours.state_dict()
    ours.close()
    return state


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_state_of_its_own_it_skips_and_says_so(after: int, workers: int) -> None:
    whole = walked(loader(Numbers(21, draws=True)), 2)
    state = stopped(Numbers(21, draws=True), after, num_workers=workers)
    assert state["step"] == after  # the window that was fetched ahead does not count
    ours = loader(Numbers(21, draws=True))
    ours.load_state_dict(state)
    with pytest.warns(
        LockstepWarning, match=rf"the first {8 * ((after - 1) % 3 + 1)} items .* skipped"
    ):
        rest = walked(ours, 2)
    assert rest == {key: batch for key, batch in whole.items() if key[1] >= after}


def test_a_state_that_needs_arguments_is_none_that_could_be_resumed_by() -> None:
    whole = walked(loader(CountsForItsOwnLoader(21)), 2)
    ours = loader(CountsForItsOwnLoader(21))
    ours.load_state_dict(stopped(CountsForItsOwnLoader(21), 2))
    with pytest.warns(LockstepWarning, match="the first 16 items"):
        assert walked(ours, 2) == {key: batch for key, batch in whole.items() if key[1] >= 2}


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(("before", "now"), [(0, 0), (2, 2), (0, 2), (2, 0)])
def test_a_dataset_with_a_state_resumes_by_it(after: int, before: int, now: int) -> None:
    whole = walked(loader(Stateful(21)), 2)
    state = stopped(Stateful(21), after, num_workers=before)
    dataset = Stateful(21)
    ours = loader(dataset, num_workers=now)
    ours.load_state_dict(state)
    assert walked(ours, 2) == {key: batch for key, batch in whole.items() if key[1] >= after}
    ours.close()
    if before == now == 0:
        assert dataset.read == (21 - 8 * after if after < 3 else -8) + 21


def resumed(world: World, state: dict[str, Any], dataset: Any) -> tuple[Seen, list[int]]:
    ours = loader(dataset)
    ours.load_state_dict(state)
    return walked(ours, 2), []


def test_the_state_of_one_rank_serves_three() -> None:
    whole = walked(loader(Stateful(21)), 2)
    found = together(run_ranks(resumed, 3, args=(stopped(Stateful(21), 2), Stateful(21))))
    assert found == {key: batch for key, batch in whole.items() if key[1] >= 2}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [1, 3])
def test_own_streams_resume_where_each_rank_was(workers: int, after: int) -> None:
    for whole, rest in run_ranks(own_resume, 2, args=(after, workers)):
        assert rest == {key: batch for key, batch in whole.items() if key[1] >= after}


def own_resume(world: World, after: int, workers: int) -> tuple[Seen, Seen]:
    options: dict[str, Any] = {"batch_per_rank": 2, "sharding": "dataset", "num_workers": workers}
    with told(world, options):
        state = stopped(Own([9, 17]), after, **options)
        ours = loader(Own([9, 17]), **options)
        whole = walked(ours, 1)
        ours.load_state_dict(state)
        rest = walked(ours, 1)
        ours.close()
        return whole, rest


def test_another_trainings_state_is_refused() -> None:
    with refused("another-training", differences="seed was 0 and is 1"):
        loader(Numbers(9), seed=1).load_state_dict(stopped(Numbers(9), 1))


# -- training ------------------------------------------------------------------------------------


class Rows(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            yield torch.tensor([number / 7, 1.0, number % 3])


def train(
    world: World, dataset: Any, options: dict[str, Any], rows: bool = True
) -> tuple[list[list[float]], list[tuple[int, ...]]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), world=world)
    shares = []
    with told(world, options):
        ours = loader(dataset, **options)
    for epoch in ours.epochs(2):
        for window in epoch:
            for batch in stepper.micro_batches(window):
                x = batch if rows else torch.stack([batch / 100, batch * 0 + 1, batch % 3 + 0.0], 1)
                stepper.backward(model(x.float()).square().sum(), weight=len(x))
            shares.append(stepper.step().samples_by_rank)
    ours.close()
    return [parameter.flatten().tolist() for parameter in model.parameters()], shares


def test_training_gives_the_same_weights_at_any_number_of_ranks() -> None:
    (weights, shares), *_ = run_ranks(train, 1, args=(Rows(19), {}))
    assert shares == [(8,), (8,), (3,)] * 2
    for size in (2, 3):
        for ours, by_rank in run_ranks(train, size, args=(Rows(19), {})):
            torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)
            assert [sum(each) for each in by_rank] == [8, 8, 3] * 2


def test_a_dry_rank_takes_part_with_weight_0() -> None:
    ranks = run_ranks(
        train, 2, args=(Own([2, 7]), {"batch_per_rank": 2, "sharding": "dataset"}, False)
    )
    assert ranks[0] == ranks[1]
    assert ranks[0][1] == [(2, 2), (0, 2), (0, 2), (0, 1)] * 2


# -- what goes wrong -----------------------------------------------------------------------------


def caught(world: World, dataset: Any, options: dict[str, Any]) -> tuple[str, str]:
    with told(world, options):
        ours = loader(dataset, **options)
    try:
        walked(ours, 1)
    except (LockstepError, OSError) as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", ()))
    finally:
        ours.close()
    return "", ""


def test_a_dataset_without_items_is_an_error_on_all_ranks() -> None:
    said = run_ranks(caught, 2, args=(Numbers(0), {}))
    assert [(kind, "epoch 0" in text and "[epoch-of-nothing]" in text) for kind, text in said] == [
        ("UsageError", True)
    ] * 2
    ours = loader(iter(range(4)))
    with refused("epoch-of-nothing", epoch=1):
        walked(ours, 2)


def test_ranks_that_read_different_streams_are_told() -> None:
    said = run_ranks(differing, 2)
    assert [(kind, "Odd" in text and "[streams-differ]" in text) for kind, text in said] == [
        ("UsageError", True)
    ] * 2


def differing(world: World) -> tuple[str, str]:
    return caught(world, Odd(world.rank), {})


class Odd(Numbers):
    """Splits itself over the ranks, though nobody said so."""

    def __init__(self, rank: int) -> None:
        super().__init__(40)
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, 40, 2))


def test_what_the_dataset_raises_is_told_where_and_after_the_good_windows() -> None:
    for workers, where in ((0, "on rank 0"), (1, "in loader worker 0 of rank 0")):
        ours = loader(Raises(9), global_batch=2, num_workers=workers)
        seen = []
        with pytest.raises(OSError, match="the disk is gone") as error:
            seen += [window.step for epoch in ours.epochs(1) for window in collecting(epoch, seen)]
        ours.close()
        assert seen == [0, 1]
        assert f"This was Raises, in epoch 0, {where}, after 5 of its items." in str(
            error.value
        ) + "".join(getattr(error.value, "__notes__", ()))


def collecting(epoch: Any, seen: list[int]) -> Iterator[Any]:
    for window in epoch:
        seen.append(window.step)
        yield window


def test_the_others_hear_of_a_rank_that_failed() -> None:
    said = run_ranks(failing_on_one, 2)
    assert [kind for kind, _ in said] == [PeerFailed.__name__, "OSError"]
    assert "rank 1" in said[0][1]
    assert "[peer-without-data]" in said[0][1]


def failing_on_one(world: World) -> tuple[str, str]:
    return caught(
        world, Raises(20) if world.rank else Numbers(20), {"global_batch": 2, "micro_batch": 1}
    )


def test_a_worker_that_dies_is_named() -> None:
    ours = loader(Dies(4), num_workers=1)
    with refused("loader-worker-killed", LoaderWorkerKilled, rank=0, worker=0, name="SIGKILL"):
        walked(ours, 1)
    ours.close()


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        (
            {"global_batch": 2, "micro_batch": 3},
            "micro-batch-too-large",
            {"micro_batch": 3, "global_batch": 2},
        ),
        (
            {"global_batch": 7, "sharding": "dataset"},
            "not-a-multiple",
            {"name": "global_batch", "value": 7, "micro_batch": 2},
        ),
        ({"global_batch": None}, "not-one-batch-size", {"global_batch": None}),
        (
            {"batch_per_rank": 3, "global_batch": None, "micro_batch": 2},
            "not-a-multiple",
            {"name": "batch_per_rank", "value": 3},
        ),
        (
            {"sharding": "mine"},
            "unknown-choice",
            {"name": "sharding", "value": "mine", "choices": ["items", "dataset"]},
        ),
        ({"rank": 0, "size": 2}, "ranks-not-of-group", {"rank": 0, "size": 2}),
        ({"num_workers": -1}, "wrong-value", {"name": "num_workers", "value": -1}),
        ({"drop_last": True}, "only-step-dropped", {"when": "epoch 0"}),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], code: str, values: dict[str, Any]) -> None:
    with refused(code, **values):
        walked(loader(Numbers(5), **options), 1)


def test_own_streams_need_a_micro_batch_for_every_rank() -> None:
    with pytest.raises(WorkerFailed, match=r"2 of 3 ranks.*\[rank-without-micro-batch\]"):
        run_ranks(caught, 3, args=(Own([1, 1, 1]), {"global_batch": 4, "sharding": "dataset"}))


def test_what_is_not_iterable_is_refused() -> None:
    with refused("not-a-loaders-dataset", what="object", needs="__iter__"):
        loader(object())
    with refused("not-a-loaders-dataset", what="DataLoader"):
        loader(DataLoader(Numbers(3), batch_size=4))
    with refused("loader-iterated", loader="StreamLoader"):
        iter(loader(Numbers(3)))


def test_the_callers_random_states_and_environment_are_left_alone() -> None:
    def states() -> Any:
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),
            random.getstate(),
            dict(os.environ),
        )  # type: ignore[index]

    before = states()
    for workers in (0, 1):
        ours = loader(Numbers(9, draws=True), num_workers=workers)
        for epoch in ours.epochs(1):
            for window in epoch:
                list(window)
                assert states() == before
        ours.close()


def test_it_describes_itself() -> None:
    assert (
        loader(Numbers(3)).describe()
        == "global batch 8 = 4 micro-batches x 2; 1 rank x 4; an iterable dataset, sharded by the"
        " loader"
    )
    assert (
        loader(Numbers(3), batch_per_rank=3)
        .describe()
        .endswith("(this recipe depends on the world size)")
    )


@pytest.mark.parametrize("wraps", [False, True])
def test_workers_that_share_their_epoch_do_not_advance_it_twice(wraps: bool) -> None:
    dataset = SharesItsEpoch(8)
    ours = loader(
        Wraps(dataset) if wraps else dataset, sharding="dataset", num_workers=2, batch_per_rank=2
    )
    seen = walked(ours, 3)
    ours.close()
    assert sorted(number for batch in seen.values() for number in batch) == [
        100 * epoch + number for epoch in range(3) for number in range(8)
    ]


# -- other people's datasets ---------------------------------------------------------------------


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(
        shards_of_numbers, gen_kwargs={"shards": [0, 1, 2, 3, 4, 5]}
    )


def shards_of_numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(shard + 1):
            yield {"x": 10 * shard + number}


def foreign(
    world: World,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    key: str,
    workers: int,
    after: int,
) -> Any:
    """Every sample of two epochs by epoch, and what is left after a resume."""
    options: dict[str, Any] = {
        "batch_per_rank": 2,
        "num_workers": workers,
        "collate_fn": list,
        "sharding": "dataset",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = loader(make(*args), **options)
        whole = walked(ours, 2)
        state = stopped(make(*args), after, **options)
        ours.load_state_dict(state)
        rest = walked(ours, 2)
        ours.close()
    flat = [
        [
            sample[key]
            for (number, *_), batch in whole.items()
            if number == epoch
            for sample in batch
        ]
        for epoch in (0, 1)
    ]
    return flat, rest == {key: batch for key, batch in whole.items() if key[1] >= after}


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (2, 2), (4, 0)])
def test_hugging_faces_datasets_shard_themselves(size: int, workers: int) -> None:
    pytest.importorskip("datasets")
    ranks = run_ranks(foreign, size, args=(hugging_face, (), "x", workers, 1))
    expected = sorted(10 * shard + number for shard in range(6) for number in range(shard + 1))
    for epoch in (0, 1):
        assert sorted(number for (epochs, _) in ranks for number in epochs[epoch]) == expected
    assert all(resumed for _, resumed in ranks)


def web_dataset(folder: str) -> Any:
    wds = pytest.importorskip("webdataset")
    return wds.WebDataset(
        [f"{folder}/{number}.tar" for number in range(5)], shardshuffle=False
    ).decode()


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (2, 2), (3, 2)])
def test_webdatasets_shard_themselves(tmp_path: Any, size: int, workers: int) -> None:
    expected = write_shards(tmp_path)
    ranks = run_ranks(foreign, size, args=(web_dataset, (str(tmp_path),), "cls", workers, 1))
    for epoch in (0, 1):
        assert sorted(number for (epochs, _) in ranks for number in epochs[epoch]) == expected
    assert all(resumed for _, resumed in ranks)


def write_shards(folder: Any) -> list[int]:
    """The samples in five files for WebDataset."""
    wds = pytest.importorskip("webdataset")
    for shard in range(5):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for number in range(shard + 1):
                tar.write({"__key__": f"{shard}-{number}", "cls": 10 * shard + number})
    return sorted(10 * shard + number for shard in range(5) for number in range(shard + 1))


def parted(
    world: World,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    key: str,
    state: Any,
    stop: int | None,
) -> Any:
    """This rank's samples by (epoch, step, slot), up to step `stop`; and the state there."""
    ours = loader(
        make(*args), global_batch=6, micro_batch=1, collate_fn=list, num_workers=world.rank % 2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if state is not None:
            ours.load_state_dict(state)
        found = {}
        for window in (window for epoch in ours.epochs(2) for window in epoch):
            check_window(window)  # exact mode takes it
            found |= {
                (window.epoch, window.step, slot): batch[0][key]
                for slot, batch in zip(window.slots, window, strict=True)
            }
            state = ours.state_dict()
            if window.step + 1 == stop:
                break
        ours.close()
    return found, state


def in_two_parts(
    sizes: tuple[int, int], make: Callable[..., Any], args: tuple[Any, ...], key: str
) -> dict[tuple[int, int, int], int]:
    before = run_ranks(parted, sizes[0], args=(make, args, key, None, 2))
    after = run_ranks(parted, sizes[1], args=(make, args, key, before[0][1], None))
    everything = [item for found, _ in [*before, *after] for item in found.items()]
    assert len(dict(everything)) == len(everything), "a slot came twice"
    return dict(everything)


def test_a_foreign_stream_that_resumes_with_other_ranks_loses_and_repeats_nothing(
    tmp_path: Any,
) -> None:
    expected = write_shards(tmp_path)
    found = in_two_parts((2, 3), web_dataset, (str(tmp_path),), "cls")
    assert [
        sorted(number for key, number in found.items() if key[0] == epoch) for epoch in (0, 1)
    ] == [expected, expected]
    pytest.importorskip("datasets")
    expected = sorted(10 * shard + number for shard in range(6) for number in range(shard + 1))
    found = in_two_parts((3, 2), hugging_face, (), "x")
    assert [
        sorted(number for key, number in found.items() if key[0] == epoch) for epoch in (0, 1)
    ] == [expected, expected]
    assert found == in_two_parts((1, 1), hugging_face, (), "x")


def test_who_shards_a_foreign_stream(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # what Hugging Face's imports is set here too, and would be left behind
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    pytest.importorskip("datasets")
    wds = pytest.importorskip("webdataset")
    split = importlib.import_module("datasets.distributed").split_dataset_by_node(
        hugging_face(), rank=0, world_size=2
    )
    assert (
        loader(hugging_face()).sharding
        == loader(hugging_face().shuffle(seed=3)).sharding
        == "items"
    )
    assert loader(split).sharding == "dataset"
    files = [f"{tmp_path}/{number}.tar" for number in range(5)]
    assert loader(web_dataset(str(tmp_path)).map(str)).sharding == "items"
    for shuffled in (
        wds.WebDataset(files, shardshuffle=False).shuffle(4),
        wds.WebDataset(files, shardshuffle=5),
        wds.WebDataset(files, shardshuffle=5, detshuffle=True),
        wds.WebDataset(files, resampled=True, shardshuffle=False),
    ):
        assert loader(shuffled).sharding == "dataset"
        assert loader(shuffled, sharding="items").sharding == "items"


def test_exact_mode_refuses_a_stream_that_shards_itself() -> None:
    window = next(iter(next(loader(Own([9]), rank=0, size=1, sharding="dataset").epochs(1))))
    with pytest.raises(UsageError, match="sharding='items'"):
        check_window(window)
