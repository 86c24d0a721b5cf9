"""Streams of other libraries through the StreamLoader: Hugging Face's datasets and WebDataset."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.gradients.exact import check_window
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.data.iterable.test_stream_loader import OWN, loader, walked

pytestmark = pytest.mark.rest

SHARDS = 6
EXPECTED = sorted(10 * shard + number for shard in range(SHARDS) for number in range(shard + 1))


def shards_of_numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(shard + 1):
            yield {"x": 10 * shard + number}


def hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(
        shards_of_numbers, gen_kwargs={"shards": [*range(SHARDS)]}
    )


def files(folder: Path) -> list[str]:
    return [f"{folder}/{number}.tar" for number in range(SHARDS)]


def web_dataset(folder: Path) -> Any:
    wds = pytest.importorskip("webdataset")
    return wds.WebDataset(files(folder), shardshuffle=False).decode()


KEYS: dict[Callable[[Path], Any], str] = {hugging_face: "x", web_dataset: "cls"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples in files for WebDataset."""
    wds = pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("shards")
    for shard, file in enumerate(files(folder)):
        with wds.TarWriter(file) as tar:
            for number in range(shard + 1):
                tar.write({"__key__": f"{shard}-{number}", "cls": 10 * shard + number})
    return folder


def sharded(
    world: World, make: Callable[[Path], Any], folder: Path, workers: int
) -> list[list[int]]:
    """This rank's samples of two epochs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = loader(make(folder), **OWN, num_workers=workers, collate_fn=list)
        seen = walked(ours, 2)
        ours.close()
    epochs: list[list[int]] = [[], []]
    for (epoch, *_), batch in seen.items():
        epochs[epoch] += [sample[KEYS[make]] for sample in batch]
    return epochs


@pytest.mark.parametrize(("size", "workers"), [(2, 2), (4, 0)])
@pytest.mark.parametrize("make", KEYS)
def test_they_shard_themselves(
    folder: Path, make: Callable[[Path], Any], size: int, workers: int
) -> None:
    ranks = run_ranks(sharded, size, args=(make, folder, workers))
    for epoch in (0, 1):
        assert sorted(number for epochs in ranks for number in epochs[epoch]) == EXPECTED


def parted(
    world: World, make: Callable[[Path], Any], folder: Path, state: Any, stop: int | None
) -> Any:
    """This rank's samples by (epoch, step, slot), up to step `stop`; and the state there."""
    ours = loader(
        make(folder), global_batch=6, micro_batch=1, collate_fn=list, num_workers=world.rank % 2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if state is not None:
            ours.load_state_dict(state)
        samples = {}
        for window in (window for epoch in ours.epochs(2) for window in epoch):
            check_window(window)  # exact mode takes it
            for slot, batch in zip(window.slots, window, strict=True):
                samples[window.epoch, window.step, slot] = batch[0][KEYS[make]]
            state = ours.state_dict()
            if window.step + 1 == stop:
                break
        ours.close()
    return samples, state


def in_two_parts(
    sizes: tuple[int, int], make: Callable[[Path], Any], folder: Path
) -> dict[tuple[int, int, int], int]:
    before = run_ranks(parted, sizes[0], args=(make, folder, None, 2))
    after = run_ranks(parted, sizes[1], args=(make, folder, before[0][1], None))
    everything = [item for samples, _ in [*before, *after] for item in samples.items()]
    assert len(dict(everything)) == len(everything), "a slot came twice"
    return dict(everything)


@pytest.mark.parametrize("make", KEYS)
def test_resumed_with_other_ranks_they_lose_and_repeat_nothing(
    folder: Path, make: Callable[[Path], Any]
) -> None:
    samples = in_two_parts((3, 2), make, folder)
    for epoch in (0, 1):
        assert sorted(number for key, number in samples.items() if key[0] == epoch) == EXPECTED
    assert samples == in_two_parts((1, 1), make, folder)


def test_who_shards_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what Hugging Face's imports is set here too, and would be left behind
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    pytest.importorskip("datasets")
    wds = pytest.importorskip("webdataset")
    whole = hugging_face(tmp_path)
    split = importlib.import_module("datasets.distributed").split_dataset_by_node(
        whole, rank=0, world_size=2
    )
    assert loader(whole).sharding == loader(whole.shuffle(seed=3)).sharding == "items"
    assert loader(split).sharding == "dataset"
    assert loader(web_dataset(tmp_path).map(str)).sharding == "items"
    for shuffled in (
        wds.WebDataset(files(tmp_path), shardshuffle=False).shuffle(4),
        wds.WebDataset(files(tmp_path), shardshuffle=5),
        wds.WebDataset(files(tmp_path), shardshuffle=5, detshuffle=True),
        wds.WebDataset(files(tmp_path), resampled=True, shardshuffle=False),
    ):
        assert loader(shuffled).sharding == "dataset"
        assert loader(shuffled, sharding="items").sharding == "items"
