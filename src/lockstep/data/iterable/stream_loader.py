"""The StreamLoader: windows of micro-batches from an iterable-style dataset, which has no length
and no indices.

With sharding="items" the stream is one sequence, cut like a map-style dataset's order
(data/windows.py). The samples of a step then depend neither on the number of ranks nor on that of
loader workers. With "dataset" every rank has its own stream, which may end earlier than others
(iterable/sharding.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lockstep.collectives.group import Group
from lockstep.config.knob import whole
from lockstep.data.choice import sizes_of
from lockstep.data.iterable.sharding import Sharding, choose_sharding, own_shard
from lockstep.data.iterable.source import Saved, StreamSource, resumes
from lockstep.data.iterable.steps import Steps, StreamCut, StreamPosition, StreamWindow
from lockstep.data.window_loader import WindowLoader, read_state
from lockstep.data.windows import BY_RANKS
from lockstep.errors import LockstepWarning, UsageError


class StreamLoader(WindowLoader["StreamEpoch"]):
    """Loads an iterable `dataset` as windows: this rank's micro-batches of one optimizer step.

    The keywords are those of a Loader and mean the same. `sharding` says who divides the stream
    among ranks and loader workers:

        "items"     the loader. Every process reads the whole stream, sees that it is alone, and
                    keeps its own items. No sample is lost or repeated, and with `micro_batch` a
                    step is the same at any number of ranks and workers. Every process reads
                    everything, so workers speed up only `collate_fn`. The default
        "dataset"   the dataset: Hugging Face's, WebDataset's, or one that looks at
                    `get_worker_info()`, RANK and WORLD_SIZE, or has a
                    `shard(rank=..., size=...)`. Each process reads only its part. The samples of a
                    step then depend on the number of ranks and of workers, whose micro-batches take
                    turns. A run that resumes with another number loses samples and repeats others.
                    Every rank must have a micro-batch in each step. The default for a WebDataset
                    that shuffles, and for a Hugging Face dataset that was split by node

    `set_epoch(epoch)` is called if the dataset has it. torch, numpy's global generator and `random`
    are seeded by (seed, epoch) when a walk begins, in the same way in all processes. The caller's
    random states do not change. To seed each sample by itself, use a map-style dataset.

    Streams may end unevenly: a rank whose stream has ended has empty windows until all have ended.
    For that the ranks exchange a few numbers each step, one window ahead. `drop_last` leaves out
    the steps that are not full on all ranks. A dataset with `state_dict` and `load_state_dict`
    resumes by them. The state is taken after every micro-batch, and `__iter__` must restart the
    stream unless a state was just loaded.

    Raises:
        UsageError: a dataset that cannot be iterated or yields nothing, sizes that cannot be cut or
            do not fit `sharding`, several ranks without a process group, and ranks that should read
            the same stream but do not.
        PeerFailed: another rank could not fetch its part of a step.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        batch_per_rank: int | None = None,
        micro_batch: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        rank: int | None = None,
        size: int | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(rank, size, seed, device, pin_memory)
        batches = isinstance(dataset, DataLoader)
        if batches or not hasattr(dataset, "__iter__"):
            needs = "single samples, as in its .dataset" if batches else "__iter__"
            raise UsageError("not-a-loaders-dataset", what=type(dataset).__name__, needs=needs)
        self.sharding = choose_sharding(dataset, sharding)
        own = self.sharding == "dataset"
        total, micro, depends = sizes_of(global_batch, batch_per_rank, micro_batch, self.size)
        self.cut = StreamCut(
            total, micro, self.rank, self.size, own_stream=own, drop_last=drop_last
        )
        self.depends_on_world_size = depends or own
        size_key = "global_batch" if batch_per_rank is None else "batch_per_rank"
        self.recipe: dict[str, Any] = {
            BY_RANKS: self.depends_on_world_size,
            "kind": "iterable",
            "sharding": self.sharding,
            "seed": self._seed,
            "drop_last": drop_last,
            size_key: total if batch_per_rank is None else batch_per_rank,
            "micro_batch": "one a rank" if micro_batch is None else micro,
        }
        """Settings that must be equal on all ranks, by name. A Stepper compares them in its first
        step.
        """
        self._group = _group_of(self.rank, self.size)
        self._name, self._resumes = type(dataset).__name__, resumes(dataset)
        self._at = StreamPosition()  # the position of the next window
        self._workers = whole("num_workers", num_workers, 0) if self.cut.share else 0
        source = StreamSource(
            own_shard(dataset, self.rank, self.size) if own else dataset,
            self._seed,
            collate_fn,
            sharding=self.sharding,
            rank=self.rank,
            size=self.size,
            whole_only=drop_last and own,
        )
        ahead = max(2, -(-len(self.cut.share) // self._workers)) if self._workers else None
        self._open(source, self._workers, ahead)
        if own and self.size > 1:
            self._warn(
                f"the order of {self._name} depends on the number of ranks, because the dataset"
                " shards itself. Give sharding='items' if it yields the same items in the same"
                " order in every process (a shuffle with a fixed seed does)"
            )

    def describe(self, owner: str = "rank") -> str:
        """One line: how the global batch is cut and shared among `owner`s, and whether that
        depends on the world size.
        """
        divider = "the loader" if self.sharding == "items" else "the dataset"
        line = self.cut.plan.describe(self.size, owner)
        return self._described(f"{line}; an iterable dataset, sharded by {divider}")

    def _epochs(self, count: int, start: int | None) -> Iterator[StreamEpoch]:
        first = start or 0
        if start is None and self._loaded:
            first = self._at.epoch
        else:
            self._loaded = False
            self._at = replace(self._at, step=self._at.step if start else 0)
        for number in range(first, count):
            yield StreamEpoch(self, number)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the data: a Loader's state, and the dataset's state in
        each loader process.

        The window yielded last counts as done, so take the state after its `stepper.step()`, not
        before. What was fetched ahead does not count. With "items", rank 0's state serves every
        rank, and any number of ranks and workers. With "dataset" each rank keeps its own state,
        which resumes exactly only at the same numbers.
        """
        return {
            "epoch": self._at.epoch,
            "step_in_epoch": self._at.step_in_epoch,
            "step": self._at.step,
            "fingerprint": self.recipe,
            "items": self._at.items,
            "processes": [self.rank, self.size, self._workers],
            "taken": self._at.taken,
            "saved": {number: saved.plain() for number, saved in self._at.saved.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next `epochs(n)` begins there. A walk in
        progress ends.

        If the dataset cannot resume by a state, the trained items are read again and skipped; the
        next walk warns how many. Raises UsageError, naming what differs, for the state of another
        seed, sharding or batch sizes.
        """
        position, step = read_state(state, self.recipe, lambda epoch: {})
        self._turns.next()
        epoch, step_in_epoch = position
        items = int(state["items"])
        before = list(state["processes"])
        now = [self.rank, self.size, self._workers]
        saved: dict[int, Saved] = {}
        if self._resumes:
            for number, plain in state["saved"].items():
                saved[int(number)] = Saved(plain["position"], plain["dataset"], plain["random"])
        taken = int(state["taken"])
        if before != now:
            saved = self._usable(saved, items)
            taken = step_in_epoch * len(self.cut.share)
        self._at = StreamPosition(
            epoch=epoch,
            step_in_epoch=step_in_epoch,
            step=step,
            items=items,
            taken=taken,
            saved=saved,
        )
        if before != now and self.cut.own_stream and step_in_epoch:
            self._warn(
                f"the state was taken on rank, of ranks, with workers {before},"
                f" and this is {now}: where {self._name} shards itself, some samples of epoch"
                f" {epoch} may be seen twice or not at all",
                every_rank=True,
            )
        self._loaded = True

    def window(self, epoch: int, step: int) -> NoReturn:
        """Raise UsageError: the items of a stream have no numbers."""
        raise UsageError("window-of-stream", dataset=self._name)

    indices = window

    def _usable(self, saved: Mapping[int, Saved], items: int) -> dict[int, Saved]:
        """Return the earliest state that other processes have saved, for each process of this rank.
        Empty if it lies after this rank's next item, or if the dataset shards itself.
        """
        first = min(saved.values(), key=attrgetter("position"), default=None)
        if first is None or self.sharding != "items" or first.position > items + self.cut.offset:
            return {}
        return dict.fromkeys(range(max(1, self._workers)), first)

    def _begin(self, number: int) -> Steps:
        """Return the steps of an epoch, from the loaded position if it is in this epoch, else from
        the epoch's beginning.
        """
        if self._loaded and self._at.epoch == number:
            self._warn_of_skipped(number)
        else:
            self._at = StreamPosition(epoch=number, step=self._at.step)
        self._loaded = False
        return Steps(
            self.cut,
            self._group,
            self._to_device(),
            self._turns,
            self._walk,
            self._at,
            name=self._name,
            processes=max(1, self._workers),
        )

    def _warn_of_skipped(self, epoch: int) -> None:
        """Warn how many items a resumed walk reads again and skips, if any."""
        skipped = self._at.items
        if self.cut.own_stream:
            skipped = self._at.taken * self.cut.micro_batch
        if skipped and not self._at.saved:
            self._warn(
                f"{self._name} resumes by reading: the first {skipped} items of epoch {epoch} are"
                " read again and skipped",
            )

    def _warn(self, sentence: str, *, every_rank: bool = False) -> None:
        if self.rank == 0 or every_rank:
            warnings.warn(sentence, LockstepWarning, stacklevel=3)


class StreamEpoch:
    """One epoch of a StreamLoader. Iteration yields its windows, equally many on all ranks. The
    number is not known before the end.
    """

    def __init__(self, loader: StreamLoader, number: int) -> None:
        self.number = number
        self._loader = loader

    def __repr__(self) -> str:
        return f"StreamEpoch({self.number})"

    def __iter__(self) -> Iterator[StreamWindow]:
        """Yield every step's window, empty ones too. The next window is fetched before one is
        yielded.
        """
        loader = self._loader
        steps = loader._begin(self.number)
        window = steps.agree(steps.fetch())
        while window is not None:
            window.recipe = loader.recipe
            fetched = steps.fetch()
            loader._at = window.after
            yield window
            window = steps.agree(fetched)
        loader._at = StreamPosition(epoch=self.number + 1, step=loader._at.step)


def _group_of(rank: int, size: int) -> Group | None:
    """Return the group that agrees on an epoch's end; None for one rank."""
    if size == 1:
        return None
    if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UsageError("ranks-not-of-group", rank=rank, size=size)
    return Group.default().host


def stream_loader(
    dataset: Any,
    *,
    order: Any = None,
    micro_batches: int | None = None,
    shuffle: bool | None = None,
    balance: Any = None,
    **options: Any,
) -> StreamLoader:
    """Make a StreamLoader from a Loader's arguments. Raises UsageError for arguments that need
    samples with indices.
    """
    name = type(dataset).__name__
    for argument, value in (
        ("order", order),
        ("micro_batches", micro_batches),
        ("shuffle", shuffle or None),
        ("balance", balance),
    ):
        if value is not None:
            raise UsageError("numbers-of-stream", name=argument, value=value, dataset=name)
    return StreamLoader(dataset, **options)
