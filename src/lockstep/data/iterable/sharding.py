"""Who reads what of an iterable dataset: which of the many kinds it is, and what it is told about
ranks and loader workers.

items       every process reads the same stream, as if it were the only one, and keeps what is its
            own: right for any dataset whose
            stream is the same everywhere, at the price that every process reads everything. Nothing
            is lost or read twice when a run resumes with another number of ranks
dataset     the dataset shards itself over ranks and workers: Hugging Face's and WebDataset's by
            their own means, any other by
            torch's `get_worker_info()` and RANK and WORLD_SIZE, or by a method `shard(rank=...,
            size=...)` if it has one. With another number of ranks a resumed run loses some samples
            and repeats others, so exact mode refuses it
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch.utils.data._utils.worker as torch_worker

from lockstep.config.knob import chosen

Sharding = Literal["items", "dataset"]


def choose_sharding(dataset: object, wanted: Sharding | None) -> Sharding:
    """`wanted`, or "items" wherever all processes can read one stream. Raises UsageError for
    another word.

    They cannot where the user has split the stream by rank already, or where WebDataset shuffles:
    by time and process, unless it has a seed, and a pipeline does not say whether its seed was
    given.
    """
    if wanted is None:
        return "dataset" if _is_split(dataset) or _shuffles_webdataset(dataset) else "items"
    chosen("sharding", wanted, get_args(Sharding))
    return wanted


def own_shard(dataset: Any, rank: int, size: int) -> Any:
    """The dataset as rank `rank` of `size` shall read it, where it shards itself. The one that
    was given is not changed by us.
    """
    if _is_hugging_face(dataset):
        return importlib.import_module("datasets.distributed").split_dataset_by_node(
            dataset, rank=rank, world_size=size
        )
    if _is_webdataset(dataset):
        return _split_webdataset(dataset)
    if callable(getattr(dataset, "shard", None)):
        sharded = dataset.shard(rank=rank, size=size)
        return dataset if sharded is None else sharded
    return dataset


@contextmanager
def seen_by_dataset(sharding: Sharding, rank: int, size: int) -> Iterator[None]:
    """What a dataset's code is told while it runs: its place among the ranks and workers, or, with
    "items", that it is alone.

    torch.distributed's own rank cannot be hidden.
    """
    alone = sharding == "items"
    told = (
        {"RANK": "0", "WORLD_SIZE": "1"} if alone else {"RANK": str(rank), "WORLD_SIZE": str(size)}
    )
    before = {name: os.environ.get(name) for name in told}
    info = torch_worker._worker_info
    os.environ.update(told)
    if alone:
        torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_hugging_face(dataset: object) -> bool:
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def _is_split(dataset: Any) -> bool:
    split = getattr(dataset, "_distributed", None) if _is_hugging_face(dataset) else None
    return getattr(split, "world_size", 1) > 1


def _is_webdataset(dataset: object) -> bool:
    kind = getattr(sys.modules.get("webdataset"), "DataPipeline", None)
    return kind is not None and isinstance(dataset, kind)


def _shuffles_webdataset(dataset: Any) -> bool:
    return any(_shuffles(stage) for stage in dataset.pipeline) if _is_webdataset(dataset) else False


def _shuffles(stage: Any) -> bool:
    name = f"{type(stage).__name__} {getattr(getattr(stage, 'f', None), '__name__', '')}".lower()
    # shardshuffle=False: a buffer of no items
    through_nothing = getattr(stage, "args", None) in ((0,), (None,))
    return (
        ("shuffle" in name and not through_nothing)
        or "resample" in name
        or getattr(stage, "seed", None) is not None
    )


def _split_webdataset(dataset: Any) -> Any:
    """A pipeline that splits its shards by rank; by worker it does so anyway. Where the user chose
    a splitter it stays.

    WebDataset refuses several ranks unless told how to split, and a process that is left without a
    shard; that one is dry here.
    """
    wds = sys.modules["webdataset"]
    split = copy.copy(dataset)
    stages = [
        wds.split_by_node if stage is wds.single_node_only else stage for stage in dataset.pipeline
    ]
    split.pipeline = [stage for stage in stages if getattr(stage, "__name__", "") != "check_empty"]
    return split
