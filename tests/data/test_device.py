"""Batches of any make reach the device with their types kept; what is there already is not
copied. The meta device stands for another one.
"""

from __future__ import annotations

import os
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.device import Ahead, OnStream, WhenAsked, copies_to, to_device
from lockstep.data.loader import Loader
from tests.data.datasets import Counted, Numbers

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


Single = namedtuple("Single", ["x"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


class Words(UserDict[str, Any]):
    """A mapping with something besides its items, as tokenizers return."""

    language = "en"


class Line(list[Any]):
    pass


def t() -> Tensor:
    return torch.ones(2)


BATCHES = [
    t(),
    [t(), t()],
    (t(), "text", 3, None),
    Pair(t(), t()),
    Single([t()]),
    {"x": t(), "deep": [(t(), {"y": t()})]},
    OrderedDict(x=t()),
    defaultdict(list, x=[t()]),
    Words(x=t()),
    Line([t()]),
    Frozen(t(), "name"),
]


def devices(batch: Any) -> list[torch.device]:
    """Where its tensors are."""
    if isinstance(batch, Tensor):
        return [batch.device]
    if isinstance(batch, Frozen):
        batch = batch.x, batch.twice
    elif isinstance(batch, (dict, UserDict)):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return []
    return [device for item in batch for device in devices(item)]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_every_tensor_moves_and_every_type_stays(batch: Any) -> None:
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert devices(moved) == [META] * len(devices(batch))
    assert set(devices(batch)) == {CPU}, "the batch itself was changed"


def test_where_it_is_already_it_is_the_same_object() -> None:
    for batch in [*BATCHES, MappingProxyType({"x": t()}), "text", 3, None, b"x", range(3)]:
        assert to_device(batch, CPU, non_blocking=True) is batch


def test_a_batch_for_the_cpu_is_handed_on_only_if_all_of_it_is_there() -> None:
    copies, here = WhenAsked(CPU, pinned=False), torch.ones(2)
    there = torch.ones(2, device=META)
    batch = [here, torch.zeros(1)]
    assert copies.arrive(batch) is batch
    for others in ([there], [here, there]):
        with pytest.raises(NotImplementedError):  # what is on meta cannot be copied
            copies.arrive(others)


def test_what_is_no_tensor_is_kept() -> None:
    assert to_device((t(), "text", 3, None), META)[1:] == ("text", 3, None)
    assert to_device(defaultdict(list, x=t()), META).default_factory is list
    assert to_device(Frozen(t(), "name"), META).name == "name"
    assert to_device(MappingProxyType({"x": t()}), META)["x"].device == META  # a dict now


def test_what_can_move_itself_does() -> None:
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert packed.data.device == META
    assert packed.batch_sizes.device == CPU  # torch wants it there


class Noted:
    """Copies nothing, and notes when it would."""

    ahead = True

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def start(self, batch: Any) -> Any:
        self.events.append(("start", np.asarray(batch).tolist()))
        return batch

    def arrive(self, started: Any) -> Any:
        self.events.append(("arrive", np.asarray(started).tolist()))
        return started


def source(*items: Any) -> Callable[[], Any]:
    left = iter(items)

    def fetch() -> Any:
        item = next(left)
        if isinstance(item, Exception):
            raise item
        return item

    return fetch


def test_what_waits_comes_first_and_an_error_in_its_place() -> None:
    copies = Noted()
    ahead, fetch = Ahead(copies), source(1, 2, KeyError("third"), 4)
    ahead.fill(2, fetch)
    assert copies.events == [("start", 1), ("start", 2)]
    assert ahead.take(fetch) == 1
    ahead.fill(3, fetch)
    ahead.fill(5, fetch)  # nothing is fetched past the error
    assert ahead.take(fetch) == 2
    with pytest.raises(KeyError, match="third"):
        ahead.take(fetch)
    assert ahead.take(fetch) == 4
    assert copies.events[-2:] == [("start", 4), ("arrive", 4)]


SIZES: dict[str, Any] = {"global_batch": 4, "micro_batch": 2, "shuffle": False}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_is_one_window_ahead_and_counts_only_what_was_handed_out(workers: int) -> None:
    loader = Loader(Numbers(10), **SIZES, device="cpu", rank=0, size=1, num_workers=workers)
    loader._copies = copies = Noted()
    started = []
    for window in next(loader.epochs(1)):
        started.append(sum(kind == "start" for kind, _ in copies.events))
        assert [batch.tolist() for batch in window] == [list(place) for place in window.positions]
        state = loader.state_dict()
        assert (state["epoch"], state["step_in_epoch"]) == divmod(window.step + 1, 3)
    assert started == [4, 5, 5]  # steps of 2, 2 and 1 micro-batches
    arrived = [batch for kind, batch in copies.events if kind == "arrive"]
    assert arrived == [[first, first + 1] for first in range(0, 10, 2)]
    loader.close()


def test_nothing_is_fetched_ahead_on_the_cpu() -> None:
    dataset = Counted(8)
    loader = Loader(dataset, **SIZES, device="cpu", rank=0, size=1)
    window = next(iter(next(loader.epochs(1))))
    assert dataset.fetched == []
    list(window)
    list(window)
    assert dataset.fetched == [0, 1, 2, 3]
    for name in ("cpu", "meta"):
        assert isinstance(copies_to(torch.device(name), pinned=False), WhenAsked)


class NotedTensor(torch.Tensor):
    """Says when it is told of another stream's use."""

    told: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.told.append(stream)


class Cuda:
    """torch.cuda, as far as OnStream uses it, for machines without: every call is noted with the
    name of its stream.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.now = "computing"

    def Stream(self, device: torch.device) -> Any:
        return self.named("copying")

    def current_stream(self, device: torch.device) -> Any:
        return self.named(self.now)

    def named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            record_event=lambda: self.calls.append((name, "records")) or "copied",
            wait_event=lambda event: self.calls.append((name, "waits for", event)),
        )

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before


class Moving:
    """Says on which stream it was moved."""

    moved_on = ""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def to(self, device: torch.device) -> Moving:
        self.moved_on = self.cuda.now
        return self


def test_the_computing_stream_waits_for_the_copy_and_the_memory_is_told() -> None:
    cuda = Cuda()
    copies = OnStream(torch.device("cpu"), cuda)
    tensor = torch.ones(2).as_subclass(NotedTensor)
    tensor.told = []
    moving, packed = Moving(cuda), pack_sequence([torch.ones(2)])
    started = copies.start({"x": [tensor, "text"], "self-moving": moving, "packed": packed})
    assert cuda.calls == [("copying", "records")]
    assert moving.moved_on == ""
    batch = copies.arrive(started)
    assert cuda.calls[1:] == [("computing", "waits for", "copied")]
    assert [stream.name for stream in tensor.told] == ["computing"]
    assert batch["x"][0] is tensor
    assert moving.moved_on == "computing"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("LOCKSTEP_REQUIRE_GPU") != "1",
    reason="no CUDA device",
)
def test_a_gpu_gets_the_right_batches_while_it_computes() -> None:
    sizes: dict[str, Any] = {"global_batch": 256, "micro_batch": 64, "shuffle": False}
    loader = Loader(Numbers(4096), **sizes, device="cuda", rank=0, size=1, num_workers=2)
    heavy = torch.rand(2048, 2048, device="cuda")
    sums = []
    for window in next(loader.epochs(1)):
        for batch in window:
            heavy = (heavy @ heavy).clamp(0, 1)
            sums.append((batch.sum(), sum(range(len(sums) * 64, len(sums) * 64 + 64))))
            del batch  # its memory may be given out again at once
    assert [found.item() for found, _ in sums] == [wanted for _, wanted in sums]
    loader.close()
