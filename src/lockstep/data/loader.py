"""The Loader: windows of micro-batches from torch's DataLoader. It never pads or repeats samples,
and drops some only on request.

The cut alone decides which samples a step consumes (data/windows.py). The rank
only decides which micro-batches are fetched here. So a micro-batch, with its augmentation
(data/keyed.py), is the same at every world size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from lockstep.config.balance import Balance
from lockstep.config.knob import whole
from lockstep.data.choice import choose_batch_plan
from lockstep.data.iterable.sharding import Sharding
from lockstep.data.keyed import KeyedDataset, Keys, shared_progress
from lockstep.data.orders import Batches, Order
from lockstep.data.walk import Walk
from lockstep.data.window_loader import (
    DynamicSlots,
    EpochCourse,
    Position,
    WindowLoader,
    read_state,
)
from lockstep.data.windows import BY_RANKS, Cut, Plan, Window
from lockstep.errors import UsageError
from lockstep.runtime import status


class Epoch:
    """One epoch. Iteration yields its windows in order; `len` is its number of steps, the same on
    all ranks.

    A resumed epoch yields the windows from its step `begin` on; its length stays. A window has this
    rank's fixed share of a step's micro-batches, or the slots that a parameter server has assigned
    to it.
    """

    def __init__(self, loader: Loader, number: int, begin: int = 0) -> None:
        self.number = number
        self.begin = begin
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.batch_plan.plan(self.number).steps_per_epoch

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {len(self)} steps)"

    def __iter__(self) -> Iterator[Window]:
        """Yield every step's Window, empty ones too. Batches that the loop did not take from a
        window are fetched before the next window.
        """
        loader, number = self._loader, self.number
        loader._position = Position(number, self.begin)
        if loader.draw is not None:
            yield from self._drawn(loader.draw)
            return
        plan = loader.batch_plan.plan(number)
        first = loader.batch_plan.first(number)
        steps = plan.steps_per_epoch
        for part, left_out in loader.left_out.parts(range(self.begin, steps), first + 1):
            walk = None if left_out else loader._walk_of(number, part, loader.share)
            for index in part:
                cut = plan.at(index, number, first + index, loader.by_rank)
                window = loader._window(cut, walk.take if walk else loader._made_here(cut))
                if walk and walk.ahead:
                    count = len(window)
                    if index + 1 < part.stop:
                        following = plan.at(index + 1, 0, 0, cut.by_rank)
                        count += len(following.filled(loader.rank, loader.size))
                    walk.fetch_ahead(count)
                over = index + 1 == steps
                loader._position = Position(number + 1, 0) if over else Position(number, index + 1)
                loader._loaded = False
                yield window
                if walk:
                    window.drain()

    def _drawn(self, draw: Callable[[EpochCourse], DynamicSlots]) -> Iterator[Window]:
        """Yield a window for each range of slots assigned to this rank, and an empty window where all
        ranks synchronize. The last one is at the epoch's end.
        """
        loader = self._loader
        plan = loader.batch_plan.plan(self.number)
        first = loader.batch_plan.first(self.number)
        last = len(plan.at(len(self) - 1, self.number, 0).filled(0, 1))
        course = EpochCourse(self.number, first, self.begin, len(self), plan.slots, last)
        over = False
        while not over:
            number, begin, end, over, _ = draw(course)
            slots = range(begin, end)
            index = number if slots else max(0, number - 1)
            cut = plan.at(index, self.number, first + index)
            if slots:
                walk = loader._walk_of(self.number, range(index, index + 1), slots)
                window = loader._window(cut, walk.take, slots)
                if walk.ahead:
                    walk.fetch_ahead(len(window))
            else:
                window = loader._window(cut, tuple, slots)
                begins = Position(self.number + 1, 0) if over else Position(self.number, number)
                loader._position = begins
                loader._loaded = False
            yield window
            window.drain()


class Loader(WindowLoader[Epoch]):
    """Loads `dataset` as windows: this rank's micro-batches of one optimizer step.

    The sizes do not depend on the number of ranks, which only decides which rank loads which
    micro-batch. `depends_on_world_size` is True for the exceptions, and `describe()` returns a line
    to print. No sample is padded: a short last step keeps its true size.

    torch, numpy's global generator and `random` are seeded for each sample by (seed, epoch, index).
    The random states of this process do not change.

    Example::

        loader = lockstep.Loader(dataset, global_batch=64, micro_batch=16)
        for epoch in loader.epochs(10):
            for window in epoch:
                for x, y in window:  # this rank's micro-batches, possibly none
                    ...

    Args:
        dataset: map-style; or iterable, which gives a StreamLoader with the same methods.
        order: the order of samples, in place of `shuffle`: an order of lockstep.data.orders; a
            torch Sampler, which every rank iterates for the whole epoch; or, with `micro_batches`,
            an order that makes the micro-batches itself, such as ByLength or a torch batch sampler.
        global_batch: samples of a step, over all ranks.
        batch_per_rank: in place of `global_batch`: the step then grows with the number of ranks
            (weak scaling), and the training depends on it.
        micro_batch: samples of a forward. Without it every rank has one micro-batch a step, as with
            plain DDP; what BatchNorm and dropout see then depends on the number of ranks.
        micro_batches: micro-batches of a step, for an `order` that makes them itself.
        seed: decides the order, and the random numbers of each sample.
        shuffle: use another order in every epoch. The default without `order`.
        num_workers: processes that load for this rank, as DataLoader's. They live as long as the
            Loader. A rank without samples starts none.
        pin_memory: as DataLoader's. Default: only if the device is a GPU.
        collate_fn: list of samples -> batch, as DataLoader's.
        drop_last: leave out the short last step, on all ranks.
        device: where batches arrive. Default: this rank's device. For a GPU they are fetched and
            copied one window ahead.
        rank: this process's number. Default: torch's process group's.
        size: the number of ranks. Default: torch's process group's.
        balance: for ranks of different speed: a number for each rank, such as "2,1,1".
            Micro-batches are shared in that proportion. Only who computes what depends on it.
        sharding: for an iterable dataset: who divides it.

    Raises:
        UsageError: an empty dataset, sizes that cannot be cut, a rank that does not exist,
            num_workers < 0, or several ranks in the environment and no process group open.
    """

    def __new__(cls, dataset: Any = None, **options: Any) -> Any:
        """Return a StreamLoader for an iterable dataset. It has the same methods."""
        if cls is Loader and is_iterable(dataset):
            from lockstep.data.iterable.stream_loader import stream_loader

            return stream_loader(dataset, **options)
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        order: Order | Batches | Sampler[Any] | None = None,
        global_batch: int | None = None,
        batch_per_rank: int | None = None,
        micro_batch: int | None = None,
        micro_batches: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        rank: int | None = None,
        size: int | None = None,
        balance: str | Sequence[float] | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(rank, size, seed, device, pin_memory)
        samples = _length(dataset)
        if sharding is not None:
            raise UsageError(
                "sharding-of-samples", sharding=sharding, dataset=type(dataset).__name__
            )
        self.batch_plan, self.depends_on_world_size = choose_batch_plan(
            samples,
            order=order,
            global_batch=global_batch,
            batch_per_rank=batch_per_rank,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            size=self.size,
        )
        self.balance = None if balance is None else Balance.of(balance)
        self.by_rank: tuple[int, ...] = ()
        """Micro-batches of a full step that each rank has; empty: equal shares."""
        if self.balance is not None:
            if self.depends_on_world_size:
                raise UsageError("balance-by-rank", balance=str(self.balance))
            self.balance.check_count(self.size)
            self.by_rank = self.balance.shares(self.batch_plan.plan(0).slots)
        self._fingerprint = self._identity(samples, micro_batch)
        self._position = Position(0, 0)  # the position of the next window
        self._recipe: dict[str, Any] | None = None
        self._digested: tuple[int, dict[str, str]] = -1, {}  # the last epoch and its digest
        workers, ahead = self._workers(whole("num_workers", num_workers, 0))
        source = KeyedDataset(dataset, self._seed, collate_fn, self.rank, shared_progress(workers))
        self._source = source
        self._open(source, workers, ahead)
        self.draw: Callable[[EpochCourse], DynamicSlots] | None = None
        """Assigns slots to this rank dynamically (`Stepper.draws`); None if each rank has a fixed
        share.
        """

    def _identity(self, samples: int, micro_batch: int | None) -> dict[str, Any]:
        """Return the settings that are saved with a position. A state with others is refused."""
        fingerprint = {
            "dataset length": samples,
            "order": self.order.fingerprint(),
            "seed": self._seed,
            **self.batch_plan.fields(),
        }
        if micro_batch is None and "micro_batch" in fingerprint:
            fingerprint["micro_batch"] = "one a rank"
        return fingerprint

    def _workers(self, wanted: int) -> tuple[int, int | None]:
        """Return (workers, batches that each fetches ahead). Together they fetch at least a window
        ahead.
        """
        slots = self.share
        if isinstance(self.order, Order):  # no later step has more samples than the first
            slots = self._first_cut.filled(self.rank, self.size)
        if wanted == 0 or not slots:
            return 0, None
        return wanted, max(2, -(-len(self.share) // wanted))

    @property
    def _first_cut(self) -> Cut:
        return self.batch_plan.plan(0).at(0, 0, 0, self.by_rank)

    @property
    def plan(self) -> Plan:
        """How the next epoch is cut into steps."""
        return self.batch_plan.plan(self._position.epoch)

    @property
    def share(self) -> range:
        """The slots of a full step that this rank has."""
        return self._first_cut.share(self.rank, self.size)

    @property
    def order(self) -> Order | Batches:
        return self.batch_plan.order

    @property
    def recipe(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks, by name, so that their windows fit together. A
        Stepper compares them in its first step.
        """
        if self._recipe is None:
            shared = {
                BY_RANKS: self.depends_on_world_size,
                "balance": None if self.balance is None else str(self.balance),
            }
            self._recipe = self._fingerprint | self._digest(self._position.epoch) | shared
        return self._recipe

    def _digest(self, epoch: int) -> dict[str, str]:
        digest = getattr(self.order, "digest", None)
        if digest is not None and self._digested[0] != epoch:
            self._digested = epoch, {f"samples of epoch {epoch}": digest(epoch)}
        return self._digested[1]

    def __len__(self) -> int:
        """Return the number of steps of the next epoch."""
        return self.plan.steps_per_epoch

    def describe(self, owner: str = "rank") -> str:
        """One line: how the global batch is cut and shared, and whether that depends on the world
        size.

        Args:
            owner: the word for a rank in that line.
        """
        return self._described(self.batch_plan.describe(self.size, owner, self.by_rank))

    def _epochs(self, count: int, start: int | None) -> Iterator[Epoch]:
        first = Position(start or 0, 0)
        if start is None and self._loaded:
            first = self._position
        for number in range(first.epoch, count):
            yield Epoch(self, number, first.step_in_epoch if number == first.epoch else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: {"epoch", "step_in_epoch", "step", "fingerprint"} of the
        next step.

        The window that was yielded last counts as done: call this after its `stepper.step()`. The
        state is the same on every rank, plain JSON, and valid for any number of ranks and of loader
        workers.
        """
        epoch, step_in_epoch = self._position
        # the last epoch that was walked: a sampler of another library is not asked for a later one
        walked = epoch if step_in_epoch else epoch - 1
        fingerprint = dict(self._fingerprint)
        if walked >= 0:
            fingerprint |= self._digest(walked)
        return {
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "step": self.batch_plan.first(epoch) + step_in_epoch,
            "fingerprint": fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next `epochs(n)` begins there.

        With an order of Lockstep this takes no time. A sampler of another library must compute the
        indices of the epoch again; no sample is loaded.

        Args:
            state: from `state_dict`, at any number of ranks.

        Raises:
            UsageError: the state of another dataset, order, seed or batch sizes, naming what
                differs.
        """
        position, step = read_state(state, self._fingerprint, self._digest)
        epoch, step_in_epoch = position
        self.batch_plan.resume(epoch, step - step_in_epoch)
        steps = self.batch_plan.plan(epoch).steps_per_epoch
        if step_in_epoch >= steps and step_in_epoch:
            raise UsageError(
                "another-training",
                place="the state",
                differences=f"{step_in_epoch=} is not in epoch {epoch}, which has {steps} steps",
            )
        self._turns.next()
        self._position = position
        self._loaded = True
        self._recipe = None

    def window(self, epoch: int, step: int) -> Window:
        """Return this rank's window of any step, with the batches that the training has there. They
        are made in this process. The position of the loader stays, and a walk goes on.

        Args:
            epoch: the number of the epoch.
            step: the number of the step in its epoch, from 0.

        Raises:
            UsageError: a step that the epoch does not have.
        """
        cut = self._cut(epoch, step)
        return self._window(cut, self._made_here(cut))

    def indices(self, epoch: int, step: int) -> list[list[int]]:
        """Return the indices in the data set of each micro-batch of a step, over all ranks.

        Args:
            epoch: the number of the epoch.
            step: the number of the step in its epoch, from 0.
        """
        cut = self._cut(epoch, step)
        return list(self.batch_plan.indices(epoch, range(step, step + 1), range(cut.slots)))

    def _cut(self, epoch: int, step: int) -> Cut:
        """Return the cut of a step of an epoch. Raises UsageError if the epoch lacks it."""
        plan = self.batch_plan.plan(whole("epoch", epoch, 0))
        steps = plan.steps_per_epoch
        if whole("step", step, 0) >= steps:
            expected = f"below {steps}, the number of steps of epoch {epoch}"
            raise UsageError("wrong-value", name="step", value=step, expected=expected)
        return plan.at(step, epoch, self.batch_plan.first(epoch) + step, self.by_rank)

    def _window(self, cut: Cut, take: Callable[[], Any], drawn: range | None = None) -> Window:
        """Return this rank's window of a step; `take` returns its next batch."""
        recipe = self._recipe or self.recipe
        counts = self.batch_plan.counts_of(cut)
        window = Window(cut, self.rank, self.size, take, counts, recipe, drawn)
        window.read = self._read
        return window

    def _read(self, cut: Cut, slots: range) -> Iterator[Any]:
        """Yield the micro-batches of these slots of a step, of any rank, made in this process."""
        step = cut.step - self.batch_plan.first(cut.epoch)
        copies = self._to_device()
        for indices in self.batch_plan.indices(cut.epoch, range(step, step + 1), slots):
            with status.inside("data"):
                fetched = self._source.__getitems__((cut.epoch, indices))
                batch = copies.arrive(copies.start(fetched))
            yield batch

    def _made_here(self, cut: Cut) -> Callable[[], Any]:
        """Return a function that makes this rank's next batch of a step in this process."""
        return partial(next, self._read(cut, cut.filled(self.rank, self.size)))

    def _walk_of(self, epoch: int, steps: range, slots: range) -> Walk:
        """Start a walk over the micro-batches of these slots in these steps of an epoch."""

        # `keys` holds no reference to this Loader: a cycle would delay its end until gc runs
        indices = partial(self.batch_plan.indices, epoch, steps, slots)

        def keys() -> Iterator[Keys]:
            return zip(repeat(epoch), indices(), strict=False)

        return self._walk(epoch, keys, self._to_device())


# help() and editors show __init__'s signature: __new__ only passes its arguments on
setattr(Loader.__new__, "__signature__", inspect.signature(Loader.__init__))  # noqa: B010 - above


def is_iterable(dataset: Any) -> bool:
    """Whether the dataset is a stream: its samples have no indices."""
    numbered = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return hasattr(dataset, "__iter__") and (isinstance(dataset, IterableDataset) or not numbered)


def _length(dataset: Any) -> int:
    numbered = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not numbered or not hasattr(dataset, "__len__"):
        raise UsageError(
            "not-a-loaders-dataset",
            what=type(dataset).__name__,
            needs="__len__ and __getitem__, or __iter__ for a stream",
        )
    return len(dataset)
