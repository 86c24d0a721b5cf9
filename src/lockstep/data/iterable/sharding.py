"""Which process reads which part of an iterable dataset, and what the dataset sees of ranks and
loader workers.

items       every process reads the whole stream, as if it were alone, and keeps its own items. This
            suits any dataset whose stream is the same everywhere; the cost is that every process
            reads everything. No sample is lost or repeated when a run resumes with another number
            of ranks
dataset     the dataset shards itself over ranks and workers. Hugging Face's and WebDataset's do so
            with their own functions; any other by torch's `get_worker_info()` and RANK and
            WORLD_SIZE, or by its method `shard(rank=..., size=...)`. With another number of ranks
            a resumed run loses some samples and repeats others, so exact mode refuses it
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
    """Return `wanted`, or by default "items" if all processes can read one stream, else "dataset".
    Raises UsageError for another word.

    They cannot if the user has split the stream by rank already, or if WebDataset shuffles.
    WebDataset's shuffle depends on time and process unless it has a seed, and a pipeline does not
    tell whether a seed was given.
    """
    if wanted is None:
        return "dataset" if _is_split(dataset) or _shuffles_webdataset(dataset) else "items"
    chosen("sharding", wanted, get_args(Sharding))
    return wanted


def own_shard(dataset: Any, rank: int, size: int) -> Any:
    """Return the dataset that rank `rank` of `size` reads if the dataset shards itself. Lockstep
    does not change `dataset` itself.
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
    """Set the rank, world size and worker that the dataset's code sees within the block. With
    "items" it sees that it is alone.

    torch.distributed's own rank cannot be hidden.
    """
    alone = sharding == "items"
    environment = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    info = torch_worker._worker_info
    if alone:
        environment = {"RANK": "0", "WORLD_SIZE": "1"}
        torch_worker._worker_info = None
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
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
    return _is_webdataset(dataset) and any(map(_shuffles, dataset.pipeline))


def _shuffles(stage: Any) -> bool:
    name = f"{type(stage).__name__} {getattr(getattr(stage, 'f', None), '__name__', '')}".lower()
    # shardshuffle=False gives a shuffle stage whose buffer has no items
    through_nothing = getattr(stage, "args", None) in ((0,), (None,))
    return (
        ("shuffle" in name and not through_nothing)
        or "resample" in name
        or getattr(stage, "seed", None) is not None
    )


def _split_webdataset(dataset: Any) -> Any:
    """Return a pipeline that splits its shards by rank; it splits them by worker already. A
    splitter that the user chose stays.

    WebDataset refuses several ranks without a splitter, and a process without a shard. Here such a
    process has an empty stream.
    """
    wds = sys.modules["webdataset"]
    split = copy.copy(dataset)
    split.pipeline = []
    for stage in dataset.pipeline:
        if stage is wds.single_node_only:
            stage = wds.split_by_node
        if getattr(stage, "__name__", "") != "check_empty":
            split.pipeline.append(stage)
    return split
