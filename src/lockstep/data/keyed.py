"""The user's data set as the loader's processes see it: every sample, and every batch, made under
its own random stream.

Augmentation then depends on (seed, epoch, index) alone: not on the rank, not on the number of
loader workers, not on what was fetched before. Batches are made here too, because a collate
function may draw as well (masked tokens, mixed images).
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.sharedctypes import RawArray
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import Dataset, StackDataset, Subset, get_worker_info

from lockstep.data.handover import collated
from lockstep.launcher import failures, processes, stalls
from lockstep.runtime import randomness
from lockstep.runtime.host_generators import Generator, Numpy, Random, Torch
from lockstep.runtime.process_lifetime import die_with_maker, die_with_parent, heed_parent_only

IDLE = -1
Made = TypeVar("Made")
Enter = Callable[[int], None]
Looks = dict[Generator, Any]
Note = Callable[[int], None]
Keys = tuple[int, list[int]]  # an epoch, and the indices of a micro-batch's samples


class KeyedDataset(Dataset[Any]):
    """Makes a whole micro-batch from the keys of its samples; leaves the random states of the
    process as they were.

    A data set with a `__getitems__` of its own is asked once for all samples. Nobody can seed it
    between them, so it draws from the stream of the first sample. A micro-batch may be fetched
    twice (`Streams`), in the first batches that draw at all. `progress` is shared with the
    workers' parent and says which sample each of them is at.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
        rank: int = 0,
        progress: Any = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or collated
        self._rank = rank
        self._progress = progress
        self._at_once = fetches_at_once(dataset)
        self._process: tuple[int, Streams, Note | None] | None = None  # a fork's pid is another

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": None}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Keys) -> Any:
        if self._process is None or self._process[0] != os.getpid():
            worker = get_worker_info()
            note = (
                None
                if worker is None or self._progress is None
                else _noting(self._progress, worker.id)
            )
            self._process = os.getpid(), Streams(), note
        _, streams, note = self._process
        batch = streams.make(partial(self._batch, *keys, note=note))
        if note is not None:
            note(IDLE)
        return batch

    def _batch(
        self, epoch: int, indices: list[int], enter: Enter | None, note: Note | None = None
    ) -> Any:
        samples = (self._at_one_go if self._at_once else self._one_by_one)(
            epoch, indices, enter, note
        )
        if enter is not None:
            enter(randomness.collate_key(self._seed, epoch, indices[0]))
        try:
            return self._collate(samples)
        except Exception as error:
            self._tell(error, epoch, indices, ", while they were made a batch")
            raise

    def _at_one_go(
        self, epoch: int, indices: list[int], enter: Enter | None, note: Note | None
    ) -> Any:
        if note is not None:
            note(indices[0])
        if enter is not None:
            enter(randomness.sample_key(self._seed, epoch, indices[0]))
        try:
            return self._dataset.__getitems__(indices)
        except Exception as error:
            self._tell(error, epoch, indices)
            raise

    def _one_by_one(
        self, epoch: int, indices: list[int], enter: Enter | None, note: Note | None
    ) -> list[Any]:
        dataset, seed = self._dataset, self._seed
        ahead = iter(indices)
        try:
            if enter is None and note is None:
                return [dataset[index] for index in ahead]
            samples = []
            for index in ahead:
                if note is not None:
                    note(index)
                if enter is not None:
                    enter(randomness.sample_key(seed, epoch, index))
                samples.append(dataset[index])
        except Exception as error:
            index = indices[-length_hint(ahead) - 1]
            error.add_note(
                f"This was sample {index} of {type(dataset).__name__}, in epoch {epoch},"
                f" {where(self._rank)}."
            )
            raise
        return samples

    def _tell(self, error: Exception, epoch: int, indices: list[int], when: str = "") -> None:
        error.add_note(
            f"These were samples {listed(indices)} of {type(self._dataset).__name__}, in epoch"
            f" {epoch}, {where(self._rank)}{when}."
        )


def where(rank: int) -> str:
    """The process that fetches, for messages."""
    worker = get_worker_info()
    return f"on rank {rank}" if worker is None else f"in loader worker {worker.id} of rank {rank}"


def listed(indices: Sequence[int], most: int = 8) -> str:
    """The numbers of samples, for a message."""
    shown = ", ".join(map(str, indices[:most]))
    return shown if len(indices) <= most else f"{shown} and {len(indices) - most} more"


def fetches_at_once(dataset: object) -> bool:
    """Whether the data set has a way of its own to fetch several samples in one call; torch's
    wrappers have what they wrap has.
    """
    if isinstance(dataset, Subset):
        return fetches_at_once(dataset.dataset)
    if isinstance(dataset, StackDataset):
        children = dataset.datasets
        return any(
            map(fetches_at_once, children.values() if isinstance(children, dict) else children)
        )
    return callable(getattr(dataset, "__getitems__", None))


def shared_progress(workers: int) -> Any:
    """Memory in which each of so many workers notes its sample."""
    return RawArray("q", [IDLE] * workers) if workers else None


def _noting(progress: Any, worker: int) -> Note:
    """What writes a sample's number into the worker's place."""
    # a third of what ctypes takes
    return partial(memoryview(progress).cast("B").cast("q").__setitem__, worker)


def worker_setup() -> Callable[[int], None] | None:
    """What a worker that this process is about to start does first: bind its life to this
    process's.

    Linux binds it to the *thread* that starts it. From any thread but the main one, which may end
    before the workers shall, nothing is bound: torch's workers look for their parent every few
    seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    return partial(_bind, os.getpid())


def _bind(parent: int, worker: int) -> None:
    heed_parent_only()
    records = os.environ.get(failures.DIRECTORY)
    if records is not None:
        processes.stacks_into(
            stalls.stack_of(Path(records), int(os.environ.get("RANK", "0")), os.getpid())
        )
    if multiprocessing.get_start_method() == "forkserver":
        # whose children keep the server alive, and it them
        die_with_parent(os.getppid())
        die_with_maker()
    else:
        die_with_parent(parent)


# -- whether a data set draws ---------------------------------------------------------------------
# Seeding costs microseconds, and most samples draw nothing. A generator's state can be looked at
# cheaply (host_generators.py). So nothing is seeded until a look shows that something was drawn; the
# fetch is then undone and made again under its own stream, and from then on that generator is always
# seeded. What a fetch returns never depends on it.


class Streams:
    """Makes things under random streams of their own; the process's own states are left as they
    were.
    """

    def __init__(self) -> None:
        self._generators: list[Generator] = [Torch(), Numpy(), Random()]
        self._drawn: list[Generator] = []

    def make(self, make: Callable[[Enter | None], Made]) -> Made:
        """What `make(enter)` returns, which calls `enter(seed)` before whatever has a stream of its
        own; None: nothing is to be seeded.

        It is called again, from the same states, where it drew from a generator that nothing had
        drawn from until then.
        """
        looks = {each: each.look() for each in self._generators}
        seeded = [each for each, look in looks.items() if each in self._drawn or each.hidden(look)]
        while True:
            try:
                made = make(_seeding(seeded))
            except Exception:
                surprised = self._surprised(looks, seeded)
                if not surprised:
                    raise
            else:
                surprised = self._surprised(looks, seeded)
                if not surprised:
                    return made
            finally:
                for generator in seeded:
                    generator.put_back(looks[generator])
            seeded = seeded + surprised

    def _surprised(self, looks: Looks, seeded: list[Generator]) -> list[Generator]:
        """Those that were drawn from without a seed: put back, and seeded from now on."""
        found = []
        for generator, look in looks.items():
            if generator.drawn(look) and generator not in seeded:
                generator.put_back(look)
                found.append(generator)
        self._drawn += [generator for generator in found if generator not in self._drawn]
        return found


def _seeding(generators: list[Generator]) -> Enter | None:
    if not generators:
        return None

    def enter(value: int) -> None:
        for generator in generators:
            generator.seed(value)

    return enter
