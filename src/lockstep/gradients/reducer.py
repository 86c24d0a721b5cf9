"""The Reducer: gradients land in buckets, full buckets leave while the backward runs, and `finish`
completes the sum.

The drop-in wrapper calls `finish` at the end of each backward and divides by the world size. The
Stepper calls it once a window and divides by the window's weight. The Reducer knows neither
optimizer nor loss nor window: it only sums.

`finish` alone is correct: it sends what has not left, and a gradient that never came counts as
zero. Sending during the backward (autograd_hooks.py) only saves time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.collectives.group import Group
from lockstep.collectives.work import Work
from lockstep.data.windows import Cut
from lockstep.errors import UsageError
from lockstep.gradients.autograd_hooks import AutogradHooks
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.bucket_timeline import BucketTimeline
from lockstep.gradients.fold import Fold, InPlace
from lockstep.gradients.layout import BUCKET, FIRST_BUCKET, Entry, Layout, plan
from lockstep.gradients.reductions import Reduction
from lockstep.gradients.trained_parameters import TrainedParameters
from lockstep.runtime import status

_MISSING = "for the number of missing gradients"


class Reducer:
    """The gradients of one model's trainable parameters, summed over the ranks of a group.

    `finish`, and `reset` or `renew` before the next window, are collective: every rank of the group
    calls them.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        reduction: Reduction,
        *,
        fold: Fold | None = None,
        bucket_bytes: int = BUCKET,
        bucket_caps: Sequence[int] = (),
        ignored: Collection[str] = (),
    ) -> None:
        self.group, self.reduction = group, reduction
        self.bucket_bytes = bucket_bytes
        self._caps = bucket_caps or (min(FIRST_BUCKET, bucket_bytes), bucket_bytes)
        self.layouts = 0
        """How often the buckets were laid out."""
        self.timeline = BucketTimeline()
        """The times of the window that is open, or was finished last."""
        self._works: list[Work] = []
        # versions of the buckets that have left, to see whether somebody writes to them
        self._versions: list[int] = []
        self.someone_misses = 0.0
        """After `finish`: above 0 if any rank had parameters without a gradient."""
        self.landed_here: Sequence[bool] = ()
        """For each parameter, whether this rank had a gradient for it in the window that was
        finished last.
        """
        self.filled_here: list[bool] = []
        """For each parameter, whether its `.grad` was None, or only an unused place, when this
        rank finished the window. Such a gradient became zeros.
        """
        self.on_leave: Callable[[Bucket], None] | None = None
        """Called with each bucket of this rank's gradients before the bucket is summed."""
        self._cut: Cut | None = None  # of the window
        self._trained = TrainedParameters(module, ignored)
        self.ignored = self._trained.ignored
        """The full names of the parameters that are left alone."""
        self.names: Sequence[str] = ()
        self.parameters: Sequence[nn.Parameter] = ()
        self.generation = 0
        """How often the model's parameters have changed."""
        self.hooks = AutogradHooks(fold or InPlace(), self._leave_next, self._works, self.timeline)
        self._take()

    # -- parameters and buckets -------------------------------------------------------------------

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._trained.close()

    def _take(self) -> None:
        """Take charge of the module's trainable parameters."""
        hooks, trained = self.hooks, self._trained
        landed = {
            id(parameter)
            for parameter, here in zip(trained.parameters, hooks.here, strict=True)
            if here
        }
        trained.take()
        self.names, self.parameters = trained.names, trained.parameters
        self.generation += 1
        hooks.static_graph.forget()
        hooks.arrivals = []
        hooks.here = [id(parameter) in landed for parameter in trained.parameters]
        self.has_finished = False  # whether a window of these parameters has been summed
        self._build(list(reversed(range(len(trained.parameters)))))

    def _follow_model(self) -> None:
        """Take charge of the parameters that are trained now. Without a Stepper, do nothing while
        all are frozen (a discriminator in the generator's step).
        """
        named = self._trained.now()
        if not named and not self.hooks.guarded:
            return
        if [id(parameter) for _, parameter in named] == list(
            map(id, self.parameters)
        ) and self._entries() == self._laid:
            return
        self._take()
        self._trained.make_equal(self.group)

    def _entries(self) -> list[Entry]:
        return [
            Entry(name, room, parameter.dtype, parameter.device)
            for name, parameter, room in zip(
                self.names, self.parameters, self.hooks.fold.room(self.parameters), strict=True
            )
        ]

    def _build(self, order: Sequence[int]) -> None:
        """Lay out the buckets. Gradients that exist already move into them."""
        self.layouts += 1
        entries = self._laid = self._entries()
        self.layout: Layout = plan(entries, order, caps=self._caps)
        # release the old buckets before the new memory is allocated
        self.buckets: list[Bucket] = []
        self.hooks.lay((), (), ())
        memory = self.reduction.memory(self.layout)
        self.buckets = [
            Bucket(bucket, self.parameters, room)
            for bucket, room in zip(self.layout.buckets, memory, strict=True)
        ]
        self.hooks.fold.lay(self.buckets, self.parameters)
        self._call_hooks()

    def _call_hooks(self) -> None:
        self._trained.call(self.hooks.lay(self.names, self.parameters, self.buckets))
        self._forget()

    def guard(self, *, adds_in_place: bool) -> None:
        """Count only the gradients of backwards in `hooks.backward`, and forbid that they are
        cleared before they are summed. `adds_in_place`: only autograd touches them.
        """
        hooks = self.hooks
        hooks.guarded, hooks.expecting = True, False
        hooks.adds_in_place = adds_in_place and not hooks.static_graph.on
        self._call_hooks()

    def dense(self) -> None:
        """From now on keep all gradients in buckets. Every rank calls it alike."""
        self.hooks.fold = InPlace()
        self._build(self.layout.order)

    def _arm(self) -> None:
        """Prepare for a closing backward."""
        self.hooks.arm()
        self._forget()

    def _forget(self) -> None:
        self._works.clear()
        self._versions.clear()

    def reset(self, cut: Cut | None = None) -> None:
        """Forget all gradients and begin a new window. `cut` says which rank has which slots; None
        if its micro-batches have no numbers.
        """
        self.hooks.here = [False] * len(self.parameters)
        self.renew()
        self.hooks.fold.clear(self.parameters)
        self._cut = cut
        if self.hooks.fold.begin(cut):
            self._build(self.layout.order)
        self._arm()
        self.hooks.strayed, self.hooks.unfinished = False, 0

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Keep the windows in this block from deciding how buckets are laid out."""
        before = self.hooks.arrivals, self.has_finished
        self.hooks.arrivals = None
        try:
            yield
        finally:
            self.hooks.arrivals, self.has_finished = before

    def renew(self) -> None:
        """Before a forward: follow changed parameters, or else, once, the order in which gradients
        arrive.

        Parameters that are new here (added to the model, or unfrozen) are made equal to rank 0's.
        If an exception ended a backward, the sums that had left are awaited and dropped.
        """
        self._trained.check_ours()
        if self.hooks.open:
            for work in self._works:
                work.wait()
            self._arm()
        if self._trained.changed():
            self._release()
            self._follow_model()
        elif self.has_finished and self.hooks.arrivals is not None:
            self._release()
            self._follow_arrivals(self.hooks.arrivals)

    def _release(self) -> None:
        """Drop gradients that are about to be forgotten, to free the memory of their buckets."""
        if self.hooks.guarded:
            for parameter in self.parameters:
                parameter.grad = None

    def _follow_arrivals(self, arrived: list[int]) -> None:
        """Lay out the buckets in the order in which gradients arrived on the rank of slot 0 in the
        first window, so that they fill one by one.
        """
        last = list(dict.fromkeys(reversed(arrived)))[::-1]  # a parameter's last gradient counts
        order = list(dict.fromkeys([*last, *self.layout.order]))
        message = torch.tensor(order, dtype=torch.int64, device=self.parameters[0].device)
        size = self.group.size
        first = 0 if self._cut is None or size == 1 else self._cut.first(size)
        self.group.broadcast(message, first, place="for the order of gradients").wait()
        self._lay(message.tolist())

    def _lay(self, order: Sequence[int]) -> None:
        """Lay out the buckets in this order, and keep it."""
        self.hooks.arrivals = None
        if list(order) != list(self.layout.order):
            self._build(order)
        else:
            self._call_hooks()

    @property
    def order(self) -> list[str]:
        """The parameters' names in the order in which their gradients lie in buckets."""
        return [self.names[number] for number in self.layout.order]

    def lay(self, names: Sequence[str]) -> None:
        """Lay out the buckets in this order, as another process did, and keep it. Every rank calls
        it alike. Raises UsageError if the names are not this model's.
        """
        if sorted(names) != sorted(self.names):
            raise UsageError(
                "checkpoint-of-another-model",
                checkpoint="the checkpoint",
                task="this training",
                differences=f"{sorted(set(names) ^ set(self.names))} have no place in the order of"
                " gradients",
            )
        numbers = {name: number for number, name in enumerate(self.names)}
        self._lay([numbers[name] for name in names])

    # -- the sum ----------------------------------------------------------------------------------

    def _leave_next(self) -> None:
        """Send the next bucket, in the order of their numbers."""
        bucket = self.buckets[len(self._works)]
        self.hooks.fold.complete(bucket)
        if self.on_leave is not None:
            self.on_leave(bucket)
        if bucket.flag is not None:
            bucket.flag.fill_(self._missing())
        if bucket.index == 0:
            self.timeline.reset()
        self._works.append(self.reduction.start(bucket))
        self.timeline.leave(self._works[-1])
        self._versions.append(bucket.sum._version)

    def take_in(self) -> None:
        """Count the gradients that something other than autograd has put into `.grad`. Call it
        between the last backward and `finish`.
        """
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.hooks.here[number]:
                self.hooks.take_in(number, parameter.grad)

    def finish(self, send: Callable[[], None] = lambda: None) -> None:
        """Send the remaining buckets in order, and wait until every gradient is the sum over all
        ranks. A gradient that never came is zero. `send` starts messages that travel behind the
        buckets.
        """
        with status.inside("reduce"):
            self._finish(send)

    def _finish(self, send: Callable[[], None]) -> None:
        hooks = self.hooks
        self.timeline.backward_is_over()
        self.filled_here = [False] * len(self.parameters)
        for bucket in self.buckets[len(self._works) :]:
            for number in (span.parameter for span in bucket.spans):
                if not hooks.closed[number]:
                    self.filled_here[number] = not hooks.here[number] and (
                        self.parameters[number].grad is None
                        # a gradient that was set by hand is another tensor
                        or (hooks.guarded and hooks.fold.all_in_place([number]))
                    )
                    hooks.fold.fill(number, hooks.scale)
            self._leave_next()
        send()
        for number, work in enumerate(self._works):
            work.wait()
            self.timeline.waited_for(number)
        hooks.fold.deliver()
        self.someone_misses = self._missing_everywhere()
        self.has_finished = True
        self.landed_here = hooks.here
        hooks.static_graph.learn()
        hooks.here = [False] * len(self.parameters)
        if hooks.guarded:
            hooks.rest()  # `reset` begins the next window
        else:
            self._arm()

    def _missing(self) -> float:
        """The number of parameters without a gradient on this rank. It is 0 on a rank without a
        backward: without a micro-batch the rank cannot tell what is missing.
        """
        here = self.hooks.here
        return float(here.count(False)) if any(here) or self.hooks.open else 0.0

    def _missing_everywhere(self) -> float:
        flag = self.buckets[-1].flag
        assert flag is not None
        if self.group.host is not self.group or not self.reduction.carries_all:
            # on a GPU, reading the flag would wait; without carries_all, nobody summed it
            missing = torch.tensor(self._missing())
            self.group.host.all_reduce(missing, place=_MISSING).wait()
            count = missing.item()
        else:
            count = flag.item()
        flag.zero_()  # the flag is no part of the gradient's norm
        return count

    def look_for_cleared(self) -> None:
        """Raise if gradients were cleared between the backward and `finish`. They belong to the
        sum, and would be lost on this rank only. Waits for no other rank.
        """
        numbers = range(len(self.names))
        if not self.hooks.fold.all_in_place(numbers):
            for number, name in enumerate(self.names):
                if self.hooks.here[number] and self.hooks.fold.cleared(number, landing=False):
                    raise UsageError("gradient-cleared", parameter=name)
        for bucket, version in zip(self.buckets, self._versions, strict=False):
            if bucket.sum._version != version:
                raise UsageError("gradient-cleared", parameter=bucket.spans[0].name)
