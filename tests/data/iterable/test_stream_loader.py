"""The StreamLoader: nothing lost or twice, no rank left waiting, and with "items" the same steps
at any number of ranks and workers.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data.iterable.stream_loader import StreamLoader
from lockstep.errors import LoaderWorkerKilled, LockstepError, LockstepWarning
from lockstep.gradients.exact import check_window
from lockstep.step.stepper import Stepper
from lockstep.world.world import World
from tests.data.datasets import draws
from tests.data.test_loader import as_data
from tests.refused import refused
from tests.teams import on_team

# what makes every rank read samples of its own
OWN = {"batch_per_rank": 2, "sharding": "dataset"}


class Numbers(IterableDataset[Any]):
    """0, 1, 2, ... after a hundred times the epoch, with what the three libraries draw."""

    def __init__(self, samples: int, draws: bool = False) -> None:
        self.samples, self.draws, self.epoch = samples, draws, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.samples):
            value = 100 * self.epoch + number
            yield (value, draws()) if self.draws else value


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
    """After five items, on rank 1."""

    rank = 1

    def __iter__(self) -> Iterator[Any]:
        yield from range(5)
        if self.rank == 1:
            raise OSError("the disk is gone")
        yield from range(5, self.samples)


class Dies(Numbers):
    def __iter__(self) -> Iterator[Any]:
        yield 0
        os.kill(os.getpid(), signal.SIGKILL)


def loader(dataset: Any, **options: Any) -> StreamLoader:
    if "batch_per_rank" not in options:
        options = {"global_batch": 8, "micro_batch": 2} | options
    return StreamLoader(dataset, device="cpu", **options)


Seen = dict[tuple[int, int, int], Any]


def global_states() -> Any:
    """The process's random states and its environment."""
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy[1].tolist(), random.getstate(), dict(os.environ)


def walked(ours: StreamLoader, epochs: int) -> Seen:
    """(epoch, step, slot) -> the batch. The process's random states and environment stay."""
    seen: Seen = {}
    before = global_states()
    for epoch in ours.epochs(epochs):
        for window in epoch:
            for slot, batch in zip(window.slots, window, strict=True):
                seen[window.epoch, window.step, slot] = as_data(batch)
            assert global_states() == before
            assert window.counts == [len(positions) for positions in window.positions]
    return seen


def flat(seen: Seen) -> list[Any]:
    """All samples, in ascending order."""
    return sorted(sample for batch in seen.values() for sample in batch)


def from_step(seen: Seen, step: int) -> Seen:
    return {key: batch for key, batch in seen.items() if key[1] >= step}


@contextmanager
def warned(world: World | None, options: dict[str, Any]) -> Iterator[None]:
    """Rank 0 says once that the order depends on the number of ranks, and no other rank does."""
    if options.get("sharding") == "dataset" and world is not None and world.rank == 0:
        with pytest.warns(LockstepWarning) as said:
            yield
        assert sum("depends on the number of ranks" in str(each.message) for each in said) == 1
    else:
        yield


def on_rank(
    world: World | None, dataset: Any, epochs: int, options: dict[str, Any]
) -> tuple[Seen, list[int]]:
    """What a rank sees, and the number of its samples in every window."""
    with warned(world, options):
        ours = loader(dataset, **options)
        samples = [window.samples for epoch in ours.epochs(epochs) for window in epoch]
        seen = walked(ours, epochs)
        ours.close()
    assert ours.depends_on_world_size == (ours.sharding == "dataset")
    return seen, samples


def everywhere(
    size: int, dataset: Any, epochs: int = 1, **options: Any
) -> list[tuple[Seen, list[int]]]:
    if size == 1:
        return [on_rank(None, dataset, epochs, options)]
    return on_team(on_rank, size, args=(dataset, epochs, options))


def together(ranks: list[tuple[Seen, list[int]]]) -> Seen:
    assert len({len(samples) for _, samples in ranks}) == 1, "not equally many windows"
    joined = {key: batch for seen, _ in ranks for key, batch in seen.items()}
    assert len(joined) == sum(len(seen) for seen, _ in ranks), "a slot came twice"
    return joined


@pytest.mark.parametrize(("size", "workers"), [(1, 2), (2, 0), (3, 1), (8, 0)])
def test_items_are_cut_alike_at_any_number_of_ranks_and_workers(size: int, workers: int) -> None:
    expected = together(everywhere(1, Numbers(21, draws=True), epochs=2))
    assert len(expected) == 2 * (4 + 4 + 3)
    assert [expected[1, 3, slot][0] for slot in (0, 1)] == [[100, 101], [102, 103]]
    options = {"epochs": 2, "num_workers": workers}
    assert together(everywhere(size, Numbers(21, draws=True), **options)) == expected


@pytest.mark.parametrize(
    ("size", "dataset", "options", "samples"),
    [
        (8, Numbers(3), {}, [[2], [1], *[[0]] * 6]),
        (2, Numbers(13), {}, [[4, 4], [4, 1]]),
        (2, Numbers(13), {"drop_last": True}, [[4], [4]]),
        (2, Own([5, 17]), {**OWN, "drop_last": True}, [[2, 2], [2, 2]]),
    ],
    ids=["fewer than ranks", "short", "dropped", "dropped where the first is not full"],
)
def test_all_ranks_have_equally_many_windows(
    size: int, dataset: Any, options: dict[str, Any], samples: list[list[int]]
) -> None:
    assert [count for _, count in everywhere(size, dataset, **options)] == samples


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_shards_itself_loses_nothing_either_way(workers: int) -> None:
    """A rank that is dry has empty windows until all are."""
    for sharding in ("items", "dataset"):
        options = {"num_workers": workers, "sharding": sharding}
        seen = together(everywhere(2, SplitsByWorker(21), **options))
        assert flat(seen) == list(range(21)), sharding
    counts = [3, 17, 0]
    ranks = everywhere(3, Own(counts), **OWN, num_workers=workers)
    for rank, (seen, _) in enumerate(ranks):
        assert flat(seen) == [100 * rank + number for number in range(counts[rank])]
    assert ranks[2][1] == [0] * 9
    assert sum(ranks[0][1][2:]) == 0


# -- resume --------------------------------------------------------------------------------------


def stopped(dataset: Any, after: int, **options: Any) -> dict[str, Any]:
    """The state after some windows of two epochs."""
    ours = loader(dataset, **options)
    windows = (window for epoch in ours.epochs(2) for window in epoch)
    for _ in range(after):
        next(windows)
        state = ours.state_dict()
    ours.close()
    return state


def resumed(
    world: World | None, state: dict[str, Any], dataset: Any, options: dict[str, Any]
) -> tuple[Seen, list[int]]:
    ours = loader(dataset, **options)
    ours.load_state_dict(state)
    seen = walked(ours, 2)
    ours.close()
    return seen, []


@pytest.mark.parametrize(
    ("dataset", "after", "workers"),
    [
        (Numbers(21, draws=True), 1, 2),
        (Numbers(21, draws=True), 3, 0),
        (Numbers(21, draws=True), 4, 0),
        (CountsForItsOwnLoader(21), 2, 0),
    ],
)
def test_without_a_state_of_its_own_it_skips_and_says_so(
    dataset: Any, after: int, workers: int
) -> None:
    """A `state_dict` that needs arguments is none to resume by."""
    undisturbed = walked(loader(dataset), 2)
    state = stopped(dataset, after, num_workers=workers)
    assert state["step"] == after  # the window that was fetched ahead does not count
    skipped = 8 * ((after - 1) % 3 + 1)
    with pytest.warns(LockstepWarning, match=rf"the first {skipped} items .* skipped"):
        rest, _ = resumed(None, state, dataset, {})
    assert rest == from_step(undisturbed, after)


def test_a_dataset_with_a_state_resumes_by_it() -> None:
    undisturbed = walked(loader(Stateful(21)), 2)
    for after, before, now in ((1, 0, 0), (2, 0, 0), (4, 0, 0), (1, 0, 2), (2, 2, 2), (4, 2, 0)):
        state = stopped(Stateful(21), after, num_workers=before)
        dataset = Stateful(21)
        rest, _ = resumed(None, state, dataset, {"num_workers": now})
        assert rest == from_step(undisturbed, after), (after, before, now)
        if before == now == 0:
            assert dataset.read == (21 - 8 * after if after < 3 else -8) + 21
    # the state of one rank serves three
    ranks = on_team(resumed, 3, args=(stopped(Stateful(21), 2), Stateful(21), {}))
    assert together(ranks) == from_step(undisturbed, 2)


def own_resume(world: World, after: int, workers: int) -> tuple[Seen, Seen]:
    options: dict[str, Any] = {**OWN, "num_workers": workers}
    with warned(world, options):
        state = stopped(Own([9, 17]), after, **options)
    with warned(world, options):
        ours = loader(Own([9, 17]), **options)
        undisturbed = walked(ours, 1)
        ours.load_state_dict(state)
        rest = walked(ours, 1)
        ours.close()
    return undisturbed, rest


@pytest.mark.parametrize(("workers", "after"), [(0, 1), (0, 3), (2, 3)])
def test_own_streams_resume_where_each_rank_was(workers: int, after: int) -> None:
    for undisturbed, rest in on_team(own_resume, 2, args=(after, workers)):
        assert rest == from_step(undisturbed, after)


def train(
    world: World, dataset: Any, options: dict[str, Any]
) -> tuple[list[list[float]], list[tuple[int, ...]]]:
    """The weights, and who had how many samples in each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), world=world)
    shares = []
    with warned(world, options):
        ours = loader(dataset, **options)
    for epoch in ours.epochs(2):
        for window in epoch:
            for batch in stepper.micro_batches(window):
                x = torch.stack([batch / 100, batch * 0 + 1, batch % 3 + 0.0], 1)
                stepper.backward(model(x).square().sum(), weight=len(x))
            shares.append(stepper.step().samples_by_rank)
    ours.close()
    return [parameter.flatten().tolist() for parameter in model.parameters()], shares


def test_training_gives_the_same_weights_at_any_number_of_ranks() -> None:
    ((weights, shares),) = on_team(train, 1, args=(Numbers(19), {}))
    assert shares == [(8,), (8,), (3,)] * 2
    for ours, by_rank in on_team(train, 3, args=(Numbers(19), {})):
        torch.testing.assert_close(ours, weights, rtol=1e-5, atol=1e-6)
        assert [sum(step) for step in by_rank] == [8, 8, 3] * 2


def test_a_dry_rank_takes_part_with_weight_0() -> None:
    first, second = on_team(train, 2, args=(Own([2, 7]), OWN))
    assert first == second
    assert first[1] == [(2, 2), (0, 2), (0, 2), (0, 1)] * 2


# -- what goes wrong -----------------------------------------------------------------------------


def failed(world: World, dataset: Any, options: dict[str, Any]) -> tuple[str, str]:
    """Which error a rank raised, and its code or its text."""
    dataset.rank, ours = world.rank, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = loader(dataset, **options)
            walked(ours, 1)
        except LockstepError as error:
            return type(error).__name__, error.code
        except OSError as error:
            return type(error).__name__, str(error)
        finally:
            if ours is not None:
                ours.close()
    return "", ""


@pytest.mark.parametrize(
    ("dataset", "options", "errors"),
    [
        (Numbers(0), {}, [("UsageError", "epoch-of-nothing")] * 2),
        (Own([20, 20]), {"sharding": "items"}, [("UsageError", "streams-differ")] * 2),
        (
            Own([1, 1]),
            {"global_batch": 2, "sharding": "dataset"},
            [("UsageError", "rank-without-micro-batch")] * 2,
        ),
        (
            Raises(20),
            {"global_batch": 2, "micro_batch": 1},
            [("PeerFailed", "peer-without-data"), ("OSError", "the disk is gone")],
        ),
    ],
    ids=["no items", "ranks read different streams", "too small a batch", "a rank failed"],
)
def test_all_ranks_hear_what_is_wrong(
    dataset: Any, options: dict[str, Any], errors: list[tuple[str, str]]
) -> None:
    assert on_team(failed, 2, args=(dataset, options)) == errors


def test_what_ends_a_walk_is_told_with_its_place_and_after_the_good_windows() -> None:
    for workers, where in ((0, "on rank 0"), (1, "in loader worker 0 of rank 0")):
        ours = loader(Raises(9), global_batch=2, num_workers=workers)
        epoch = iter(next(ours.epochs(1)))
        assert [next(epoch).step, next(epoch).step] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone") as error:
            next(epoch)
        ours.close()
        text = str(error.value) + "".join(getattr(error.value, "__notes__", ()))
        assert f"This was Raises, in epoch 0, {where}, after 5 of its items." in text
    ours = loader(Dies(4), num_workers=1)
    with refused("loader-worker-killed", LoaderWorkerKilled, rank=0, worker=0, name="SIGKILL"):
        walked(ours, 1)
    ours.close()


def test_what_cannot_be_walked_is_refused() -> None:
    with refused("not-a-loaders-dataset", what="object", needs="__iter__"):
        loader(object())
    with refused("not-a-loaders-dataset", what="DataLoader"):
        loader(DataLoader(Numbers(3), batch_size=4))
    with refused("loader-iterated", loader="StreamLoader"):
        iter(loader(Numbers(3)))
    with refused("epoch-of-nothing", epoch=1):
        walked(loader(iter(range(4))), 2)
    with refused("not-a-multiple", name="global_batch", value=7, micro_batch=2):
        loader(Numbers(5), global_batch=7, sharding="dataset")
    with refused("unknown-choice", value="mine"):
        loader(Numbers(5), sharding="mine")
    with refused("ranks-not-of-group", rank=0, size=2):
        loader(Numbers(5), rank=0, size=2)
    with refused("wrong-value", name="num_workers", value=-1):
        loader(Numbers(5), num_workers=-1)
    with refused("only-step-dropped", when="epoch 0"):
        walked(loader(Numbers(5), drop_last=True), 1)
    with refused("another-training", differences="seed was 0 and is 1"):
        loader(Numbers(9), seed=1).load_state_dict(stopped(Numbers(9), 1))
    window = next(iter(next(loader(Own([9]), sharding="dataset").epochs(1))))
    with refused("exact-cut-by-ranks"):
        check_window(window)


def test_workers_that_share_their_epoch_do_not_advance_it_twice() -> None:
    for make in (SharesItsEpoch, lambda samples: Wraps(SharesItsEpoch(samples))):
        ours = loader(make(8), **OWN, num_workers=2)
        seen = walked(ours, 3)
        ours.close()
        assert flat(seen) == [100 * epoch + number for epoch in range(3) for number in range(8)]
