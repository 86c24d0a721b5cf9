"""The steps of one epoch of a stream: which micro-batches this rank requests, and how all ranks
agree on the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from lockstep.collectives.group import Group
from lockstep.collectives.work import Work
from lockstep.data.device import Copies, WhenAsked
from lockstep.data.iterable.source import COMPARED, UNKNOWN, Reply, Request, Saved
from lockstep.data.walk import Turns, Walk
from lockstep.data.windows import ENDLESS, Cut, Plan, Window
from lockstep.errors import PeerFailed, UsageError

_NOTHING = -(2**62)  # less than any other value, so that it has no effect on a maximum
_HAS, _SHORT, _FAILED, _MOST, _LEAST, _HIGH, _LOW = range(7)  # indices into a step's message


class StreamCut:
    """How every step is cut, and which slots belong to this rank. Raises UsageError for sizes that
    do not fit together.
    """

    def __init__(
        self,
        global_batch: int,
        micro_batch: int,
        rank: int,
        size: int,
        *,
        own_stream: bool,
        drop_last: bool,
    ) -> None:
        self.plan = Plan(samples=ENDLESS, global_batch=global_batch, micro_batch=micro_batch)
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.size = size
        self.own_stream = own_stream
        self.drop_last = drop_last
        if own_stream and global_batch % micro_batch:
            raise UsageError(
                "not-a-multiple",
                name="global_batch",
                value=global_batch,
                micro_batch=micro_batch,
                other="batch_per_rank",
            )
        if own_stream and self.plan.slots < size:
            raise UsageError(
                "rank-without-micro-batch",
                global_batch=global_batch,
                micro_batch=micro_batch,
                slots=self.plan.slots,
                size=size,
            )
        self.share = self.step(0, 0, 0, None).share(rank, size)

    @property
    def offset(self) -> int:
        """The number of a step's samples before this rank's first one."""
        return self.share.start * self.micro_batch

    def step(self, step: int, epoch: int, start: int, total: int | None) -> Cut:
        """Return one step's cut. If the stream's `total` is known, the cut does not exceed it."""
        stop = start + self.global_batch
        if total is not None:
            stop = max(start, min(stop, total))
        return self.plan.at(0, epoch, step)._replace(start=start, stop=stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPosition:
    """A rank's position in a stream: the first step that is not done."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    """The step's number over all epochs."""
    items: int = 0
    """Items of the epoch in the steps before, over all ranks."""
    taken: int = 0
    """Requests of the epoch that were answered for the steps before."""
    saved: Mapping[int, Saved] = field(default_factory=dict)
    """The dataset's state at this position, by loader process of this rank."""


class StreamWindow(Window):
    """A Window of a stream. If the dataset shards itself, `positions` count the items that one
    loader process reads.
    """

    after: StreamPosition
    """The rank's position when this window is done."""


@dataclass(slots=True)
class Fetched:
    """This rank's data for a step, before the ranks agree whether the step exists."""

    slots: list[int] = field(default_factory=list)
    positions: list[range] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    started: list[Any] = field(default_factory=list)
    """Batches on their way to the device."""
    error: Exception | None = None
    taken: int = 0
    saved: dict[int, Saved] = field(default_factory=dict)
    message: torch.Tensor | None = None
    work: Work | None = None


class Steps:
    """One walk through one epoch. `fetch` gets a step's data and starts an all-reduce. `agree`
    waits for it and returns the window. The next step is fetched before the window is yielded.

    Args:
        cut: how every step is cut.
        group: the ranks that agree on the epoch's end; None for one rank.
        copies: how batches reach the device.
        turns: the turns of the loader's walks.
        walk: starts a walk for an epoch, from a function that yields its requests.
        at: the position at which this walk begins.
        name: the dataset's name, for messages.
        processes: the number of processes that read the stream on this rank.
    """

    def __init__(
        self,
        cut: StreamCut,
        group: Group | None,
        copies: Copies,
        turns: Turns,
        walk: Callable[[int, Callable[[], Iterator[Request]], Copies], Walk],
        at: StreamPosition,
        *,
        name: str,
        processes: int,
    ) -> None:
        self._cut = cut
        self._group = group
        self._copies = copies
        self._turns = turns
        self._begin = at
        self._name = name
        self._processes = processes
        self._agreed = at.step_in_epoch
        # torch sends its first request to process 0
        self._taken = at.taken - at.taken % processes if cut.own_stream else 0
        self._saved = dict(at.saved)
        self._ended: set[int] = set() if cut.share else {0}
        self._total = self._digest = UNKNOWN
        self._all_total: int | None = None
        self._failed = False
        self._walk: Walk | None = None
        if cut.share:
            copied = WhenAsked(torch.device("cpu"), pinned=False)
            self._walk = walk(at.epoch, partial(self._requests, self._taken), copied)

    def _requests(self, first: int) -> Iterator[Request]:
        """Yield requests for this rank's micro-batches; number n goes to process n % processes. The
        first request to a process has the state from which it may begin.
        """
        walk, at = self._turns.now, self._begin
        for number in count(first):
            begins = number < first + self._processes
            saved = at.saved.get(number % self._processes) if begins else None
            yield Request(at.epoch, self._positions(number), walk, saved)

    def _positions(self, number: int) -> range:
        cut = self._cut
        if cut.own_stream:
            start = number // self._processes * cut.micro_batch
            trained = number < self._begin.taken
            return range(start, start if trained else start + cut.micro_batch)
        ahead, index = divmod(number, len(cut.share))
        start = self._begin.items + ahead * cut.global_batch
        return cut.step(0, 0, start, None).positions(cut.share[index])

    def fetch(self) -> Fetched:
        """Fetch this rank's part of the next step. An error is kept until `agree` raises it, so
        that the steps fetched before can be trained first.
        """
        fetched = Fetched()
        if not self._failed:
            try:
                for slot in self._cut.share:
                    self._fetch_micro_batch(slot, fetched)
            except Exception as error:
                fetched.error = error
                self._failed = True
        fetched.taken = self._taken
        fetched.saved = dict(self._saved)
        self._send(fetched)
        return fetched

    def _fetch_micro_batch(self, slot: int, fetched: Fetched) -> None:
        """Fetch one micro-batch, from the process whose turn it is, or from the next one if that
        process's stream has ended.
        """
        streams = self._processes if self._cut.own_stream else 1
        while self._walk is not None and len(self._ended) < streams:
            number = self._taken
            reply: Reply = self._walk.take()
            process = number % self._processes
            self._taken += 1
            if reply.saved is not None:
                self._saved[process] = reply.saved
            if reply.total != UNKNOWN:
                self._total = reply.total
            if reply.digest != UNKNOWN:
                self._digest = reply.digest
            positions = self._positions(number)
            if reply.items < len(positions):
                self._ended.add(process if self._cut.own_stream else 0)
            if reply.items:
                fetched.slots.append(slot)
                fetched.positions.append(positions[: reply.items])
                fetched.counts.append(reply.items)
                fetched.started.append(self._copies.start(reply.batch))
                return

    def _send(self, fetched: Fetched) -> None:
        """Start the all-reduce that tells whether any rank has data for this step, and whether all
        ranks read the same stream.
        """
        cut = self._cut
        last = min(cut.share.stop * cut.micro_batch, cut.global_batch)
        wanted = max(0, last - cut.offset)
        values = [_NOTHING] * 7
        values[_HAS] = int(bool(fetched.slots))
        values[_SHORT] = int(sum(fetched.counts) < wanted)
        values[_FAILED] = cut.rank if fetched.error is not None else _NOTHING
        if not cut.own_stream:
            if self._total != UNKNOWN:
                values[_MOST], values[_LEAST] = self._total, -self._total
            if self._digest != UNKNOWN:
                values[_HIGH], values[_LOW] = self._digest, -self._digest
        group = self._group
        fetched.message = torch.tensor(values)
        if group is not None:
            if dist.get_backend(group.process_group) == "nccl":
                fetched.message = fetched.message.cuda()
            fetched.work = group.all_reduce(
                fetched.message, "max", place="for the next window of a stream"
            )

    def agree(self, fetched: Fetched) -> StreamWindow | None:
        """Return the step's window, or None on all ranks if the epoch has ended.

        Raises the error of this rank's fetch, PeerFailed if another rank's fetch failed, and
        UsageError if the epoch is empty, has no full step, or the ranks' streams differ.
        """
        if fetched.error is not None:
            raise fetched.error
        assert fetched.message is not None
        if fetched.work is not None:
            fetched.work.wait()
        values: list[int] = fetched.message.tolist()
        self._check(values)
        first = self._agreed == 0
        if not values[_HAS]:
            if first:
                raise UsageError("epoch-of-nothing", name=self._name, epoch=self._begin.epoch)
            return None
        if values[_SHORT] and self._cut.drop_last:
            if first:
                raise UsageError(
                    "only-step-dropped",
                    when=f"epoch {self._begin.epoch}",
                    have="the samples of some rank",
                    need=f"global_batch={self._cut.global_batch}",
                )
            return None
        if values[_MOST] != _NOTHING:
            self._all_total = values[_MOST]
        return self._window(fetched)

    def _check(self, values: list[int]) -> None:
        if values[_FAILED] != _NOTHING:
            raise PeerFailed("peer-without-data", rank=values[_FAILED], epoch=self._begin.epoch)
        difference = ""
        most, least = values[_MOST], -values[_LEAST]
        if most not in (_NOTHING, least):
            difference = f"it ended after {least} items on one and after {most} on another"
        elif values[_HIGH] not in (_NOTHING, -values[_LOW]):
            difference = f"its first {COMPARED} items differ"
        if difference:
            raise UsageError("streams-differ", dataset=self._name, difference=difference)

    def _window(self, fetched: Fetched) -> StreamWindow:
        cut, at = self._cut, self._begin
        ahead = self._agreed - at.step_in_epoch
        start = at.items + ahead * cut.global_batch
        batches = map(self._copies.arrive, fetched.started)
        window = StreamWindow(
            cut.step(at.step + ahead, at.epoch, start, self._all_total),
            cut.rank,
            cut.size,
            partial(next, batches),
        )
        if fetched.slots:
            window.slots = range(fetched.slots[0], fetched.slots[-1] + 1)
        else:
            window.slots = range(cut.share.start, cut.share.start)
        window.positions = fetched.positions
        window.counts = fetched.counts
        self._agreed += 1
        window.after = StreamPosition(
            epoch=at.epoch,
            step_in_epoch=self._agreed,
            step=at.step + ahead + 1,
            items=start + cut.global_batch,
            taken=fetched.taken,
            saved=fetched.saved,
        )
        return window
