"""The Reducer: gradients become ready in buckets, full buckets are launched while the backward runs,
and `finish` completes the sum.

The drop-in wrapper calls `finish` at the end of each backward and divides by the world size. The
Stepper calls it once a window and divides by the window's weight. The Reducer knows neither
optimizer nor loss nor window: it only sums.

`finish` alone is correct: it launches what was not launched, and a gradient that never came counts
as zero. Launching during the backward only saves time.

A gradient that autograd delivers is one of these:

    unexpected  no backward whose gradients count is running: noted, and left in `.grad`
    cleared     an earlier gradient of this window, which belonged to the sum, was replaced: an error
    late        its bucket was launched, or its parameter has had its last gradient: an error
    ready       further ones of its parameter may follow, and are added to it
    final       the last of its parameter: its bucket waits for one gradient less, and is launched
                when it waits for none

Python's part of a gradient takes longer than the backward of a small one. So small gradients are
only stored in a dictionary, and counted together when a large gradient or the last one of a bucket is
ready, and when the backward ends. Autograd adds a Stepper's in place; a wrapper's, which its caller
may clear, are copied to their bucket when they are counted.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.collectives.group import Group
from lockstep.collectives.work import Work
from lockstep.data.windows import Cut
from lockstep.errors import LockstepWarning, UsageError
from lockstep.gradients.bucket import Bucket, BucketTimeline, TrainedParameters, bucket_of_each
from lockstep.gradients.fold import Fold, InPlace
from lockstep.gradients.layout import BUCKET, FIRST_BUCKET, Layout, plan
from lockstep.gradients.reductions import Reduction
from lockstep.gradients.static_graph import StaticGraph

_SMALL = 2**17  # bytes; zeroing the memory of a larger gradient costs more than a Python call
_MISSING = "for the number of missing gradients"
_NO_GRAPH = (
    "backward(create_graph=True): the mean over the ranks has no graph, so the gradient of {!r}"
    " cannot be differentiated again. Use torch.autograd.grad for derivatives of gradients"
)
_DENSE = (
    "the gradient of {!r} is sparse, but a Stepper sums it as a dense gradient."
    " lockstep.DistributedDataParallel without a Stepper keeps the gradients of"
    " nn.Embedding(sparse=True) sparse"
)
_STALE = (
    "A step and the end of a micro-batch write to weights and buffers. So what another window, or"
    " another micro-batch, has computed cannot be used again here: compute it anew, as a GAN's"
    " generator its images."
)


class State(enum.Enum):
    """How far the sum of a window is."""

    IDLE = "no gradient is ready"
    ACCUMULATING = "gradients are ready, and more backwards follow"
    SENDING = "the closing backward runs: full buckets are launched"
    FINISHED = "the sums over all ranks are there"


class Reducer:
    """The gradients of one model's trainable parameters, summed over the ranks of a group.

    `finish`, and `reset` or `renew` before the next window, are collective: every rank of the group
    calls them. Parameters go by their numbers in `names` and `parameters`.
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
        self.group = group
        self.reduction = reduction
        self.fold = fold or InPlace()
        self.bucket_bytes = bucket_bytes
        self._caps = bucket_caps or (min(FIRST_BUCKET, bucket_bytes), bucket_bytes)
        self._trained = TrainedParameters(module, ignored)
        self.ignored = self._trained.ignored
        """The full names of the parameters that are left alone."""
        self.names: Sequence[str] = ()
        self.parameters: Sequence[nn.Parameter] = ()
        self.generation = 0
        """How often the model's parameters have changed."""
        self.layouts = 0
        """How often the buckets were laid out."""
        self.buckets: list[Bucket] = []
        self.sums: list[Tensor] = []
        """The flat tensor of each bucket."""

        self.state = State.IDLE
        self.closing = False
        """Whether full buckets may be launched during this backward."""
        # Set by a Stepper: only the gradients of its own backwards count, and clearing them before
        # `finish` is an error.
        self._guarded = False
        self._adds_in_place = False
        self.expecting = True
        """Whether a backward whose gradients count is running."""
        self._unexpected = False  # whether an unexpected gradient was delivered
        self.reached = False
        """Whether a gradient was delivered since this was last set to False."""
        self.unfinished = 0
        """Backwards of this window that an exception ended. A part of the gradients of such a
        micro-batch is ready.
        """
        self.scale = 1.0
        """The factor of each gradient when it is launched: 1, or the wrapper's 1 / world size."""
        self.static_graph = StaticGraph()
        self.on_first: Callable[[], None] | None = None
        """Called with the first gradient of a closing backward."""
        self.on_ready: Callable[[int, Tensor], None] | None = None
        """Called with each parameter's number and gradient, before the gradient is summed."""
        self.on_launch: Callable[[Bucket], None] | None = None
        """Called with each bucket of this rank's gradients before the bucket is summed."""
        self.ready: list[bool] = []
        """For each parameter, whether a gradient is ready in this window."""
        self._final: list[bool] = []  # whether it has had its last gradient, which is scaled
        self._small: Collection[int] = ()  # gradients that are in their buckets from the beginning
        # by number, the parameters whose small gradients were delivered and not counted yet
        self._uncounted: dict[int, Tensor] = {}
        self._bucket_of: list[Bucket] = []
        self._gradients_in: list[int] = []  # per bucket: how many gradients it has
        self._to_come: list[int] = []  # per bucket: the final gradients that it waits for
        self._order: list[int] | None = []
        """The parameters' numbers in the order in which gradients become ready in a backward of the
        first window. None once the buckets follow this order.
        """
        self._warned: set[str] = set()

        self.timeline = BucketTimeline()
        """The times of the window that is open, or was finished last."""
        self._works: list[Work] = []  # the sums of the buckets that were launched
        self._versions: list[int] = []  # of these buckets, to see whether somebody writes to them
        self.someone_misses = 0.0
        """After `finish`: above 0 if any rank had parameters without a gradient."""
        self.ready_here: Sequence[bool] = ()
        """For each parameter, whether this rank had a gradient for it in the window that was
        finished last.
        """
        self.filled_here: list[bool] = []
        """For each parameter, whether its `.grad` was None, or only unused memory, when this rank
        finished the window. Such a gradient became zeros.
        """
        self._cut: Cut | None = None  # of the window
        self._take_parameters()

    # -- parameters and buckets -------------------------------------------------------------------

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._trained.close()

    def guard(self, *, adds_in_place: bool) -> None:
        """Count only the gradients of backwards in `backward`, and forbid that they are cleared
        before they are summed. `adds_in_place`: only autograd touches them, so a small gradient may
        be in its bucket before it is ready.
        """
        self._guarded = True
        self.expecting = False
        self._adds_in_place = adds_in_place and not self.static_graph.on
        self._hook_parameters()

    def dense(self) -> None:
        """From now on keep all gradients in buckets. Every rank calls it alike."""
        self.fold = InPlace()
        self._build(self.layout.order)

    def _take_parameters(self) -> None:
        """Take charge of the module's trainable parameters."""
        ready = set()
        for parameter, is_ready in zip(self.parameters, self.ready, strict=True):
            if is_ready:
                ready.add(id(parameter))
        self._trained.take_charge()
        self.names = self._trained.names
        self.parameters = self._trained.parameters
        self.generation += 1
        self.static_graph.forget()
        self._order = []
        self.ready = [id(parameter) in ready for parameter in self.parameters]
        self.has_finished = False  # whether a window of these parameters has been summed
        self._build(list(reversed(range(len(self.parameters)))))

    def _follow_model(self) -> None:
        """Take charge of the parameters that are trained now. Without a Stepper, do nothing while
        all are frozen (a discriminator in the generator's step).
        """
        named = self._trained.now()
        if not named and not self._guarded:
            return
        identities = [id(parameter) for _, parameter in named]
        entries = self._trained.entries(self.fold.sizes(self.parameters))
        if identities == list(map(id, self.parameters)) and entries == self._planned:
            return
        self._take_parameters()
        self._trained.make_equal(self.group)

    def _build(self, order: Sequence[int]) -> None:
        """Lay out the buckets. Gradients that exist already move into them."""
        self.layouts += 1
        self._planned = self._trained.entries(self.fold.sizes(self.parameters))
        self.layout: Layout = plan(self._planned, order, caps=self._caps)
        # release the old buckets before the new memory is allocated
        self.buckets, self.sums, self._bucket_of = [], [], []
        memory = self.reduction.memory(self.layout)
        for bucket_plan, flat in zip(self.layout.buckets, memory, strict=True):
            self.buckets.append(Bucket(bucket_plan, self.parameters, flat))
        self.sums = [bucket.sum for bucket in self.buckets]
        self.fold.lay(self.buckets, self.parameters)
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        """Have autograd call a hook for each parameter."""
        self._bucket_of = bucket_of_each(self.buckets)
        self._gradients_in = [len(bucket.spans) for bucket in self.buckets]
        numbers = range(len(self._bucket_of))
        last_in_bucket = {bucket.spans[-1].parameter for bucket in self.buckets}
        small: set[int] = set()
        # the first window checks each gradient: whether it is sparse, and when it becomes ready
        if self.fold.adds_in_place and self._order is None and not self.static_graph.on:
            for number in numbers:
                if self.parameters[number].nbytes <= _SMALL and not self.fold.keeps_sparse(number):
                    small.add(number)
        if self._guarded and not self._adds_in_place:
            small.clear()
        self._small = small
        self.fold.keep(small if self._guarded else ())
        self._arm()
        here = ref(self)
        hooks: list[Callable[[Tensor], None]] = []
        for number in numbers:
            if number not in small or number in last_in_bucket:
                hooks.append(partial(self._delivered, here, number))
            elif self._guarded:
                hooks.append(partial(self._uncounted.__setitem__, number))
            else:  # a Stepper's backward has an end; a wrapper must note that one has begun
                hooks.append(partial(self._noted, here, number))
        self._trained.call(hooks)

    def _arm(self) -> None:
        """Prepare for a closing backward: one during which full buckets may be launched."""
        self.state = State.ACCUMULATING if True in self.ready else State.IDLE
        self._uncounted.clear()
        self._works.clear()
        self._versions.clear()
        self._final = [False] * len(self.parameters)
        self._to_come = self._gradients_in.copy()
        if self.static_graph.on:
            self.static_graph.begin(len(self.parameters))

    def use_static_graph(self) -> None:
        """Expect every backward to be like the first. Call it before the first is over."""
        self.static_graph.on = True
        self.static_graph.begin(len(self.parameters))

    def reset(self, cut: Cut | None = None) -> None:
        """Forget all gradients and begin a new window. `cut` says which rank has which slots; None
        if its micro-batches have no numbers.
        """
        self.ready = [False] * len(self.parameters)
        self.renew()
        self.fold.clear(self.parameters)
        self._cut = cut
        if self.fold.begin(cut):
            self._build(self.layout.order)
        else:
            self._arm()
        self._unexpected = False
        self.unfinished = 0

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Keep the windows in this block from deciding how buckets are laid out."""
        before = self._order, self.has_finished
        self._order = None
        try:
            yield
        finally:
            self._order, self.has_finished = before

    def renew(self) -> None:
        """Before a forward: follow changed parameters, or else, once, the order in which gradients
        became ready.

        Parameters that are new here (added to the model, or unfrozen) are made equal to rank 0's.
        If an exception ended a backward, the sums that were launched are awaited and dropped.
        """
        if self._trained.taken_over:
            raise UsageError("parameters-taken-over")
        if self.state is State.SENDING:
            for work in self._works:
                work.wait()
            self._arm()
        if not self._guarded:
            self.keep_accumulated()
        if self._trained.changed():
            self._release()
            self._follow_model()
        elif self.has_finished and self._order is not None:
            self._release()
            self._follow_order(self._order)

    def _release(self) -> None:
        """Drop gradients that are about to be forgotten, to free the memory of their buckets."""
        for parameter in self.parameters if self._guarded else ():
            parameter.grad = None

    def _follow_order(self, ready: list[int]) -> None:
        """Lay out the buckets in the order in which gradients became ready on the rank of slot 0 in
        the first window, so that they fill one by one.
        """
        last = list(dict.fromkeys(reversed(ready)))[::-1]  # a parameter's last gradient counts
        order = list(dict.fromkeys([*last, *self.layout.order]))
        message = torch.tensor(order, dtype=torch.int64, device=self.parameters[0].device)
        size = self.group.size
        first = 0 if self._cut is None or size == 1 else self._cut.first(size)
        self.group.broadcast(message, first, place="for the order of gradients").wait()
        self._lay(message.tolist())

    def _lay(self, order: Sequence[int]) -> None:
        """Lay out the buckets in this order, and keep it."""
        self._order = None
        if list(order) != list(self.layout.order):
            self._build(order)
        else:
            self._hook_parameters()

    @property
    def order(self) -> list[str]:
        """The parameters' names in the order in which their gradients lie in buckets."""
        return [self.names[number] for number in self.layout.order]

    def lay(self, names: Sequence[str]) -> None:
        """Lay out the buckets in this order, as another process did, and keep it. Every rank calls
        it alike, with the names of all parameters.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        self._lay([numbers[name] for name in names])

    # -- gradients become ready --------------------------------------------------------------------

    @property
    def unexpected(self) -> bool:
        """Whether an unexpected gradient was delivered. Ask only outside of `backward`."""
        return self._unexpected or (self._guarded and bool(self._uncounted))

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch. Its buckets stay here until `allow_launch`."""
        self.closing = False
        self.fold.begin_micro_batch()

    def allow_launch(self) -> None:
        """From now on launch full buckets: this micro-batch is the last, and the messages that go
        before them have left.
        """
        self.closing = True

    def end_micro_batch(self, *, interrupted: bool = False) -> None:
        """End the micro-batch. `interrupted`: not all of its gradients may be ready."""
        if not self.closing and not interrupted:
            self.fold.end_micro_batch()
        self.closing = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the gradients that are delivered in this block."""
        if self._uncounted:
            self._unexpected = self.unexpected
            self._uncounted.clear()
        before, self.expecting = self.expecting, True
        self.unfinished += 1
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(_STALE)
            raise
        finally:
            if self._uncounted:
                self._count_small()
            self.expecting = before
        self.unfinished -= 1

    def forget_unexpected(self) -> None:
        """Forget that unexpected gradients were delivered."""
        self._unexpected = False
        self._uncounted.clear()

    # The hooks. None holds the reducer: Python cannot free what a hook of its own parameter refers to.

    @staticmethod
    def _delivered(reducer: ref[Reducer], number: int, parameter: Tensor) -> None:
        """Handle a gradient that autograd has put into `.grad`."""
        self = reducer()
        if self is None:
            return
        if not self.expecting:
            self._unexpected = True
        elif not self.closing and number in self._small:
            self._uncounted[number] = parameter  # no bucket waits for it
        else:
            if self.closing and self.state is not State.SENDING:
                self._begin_sending()
            if self._uncounted:
                self._count_small()
            self.gradient_ready(number, parameter)

    @staticmethod
    def _noted(reducer: ref[Reducer], number: int, parameter: Tensor) -> None:
        """Note a wrapper's small gradient, which is counted later."""
        self = reducer()
        if self is None:
            return
        if self.closing and self.state is not State.SENDING:
            self._begin_sending()
        self._uncounted[number] = parameter

    def _count_small(self) -> None:
        """Count the small gradients that were delivered, in their order."""
        self.reached = True
        delivered = self._uncounted.copy()
        self._uncounted.clear()
        if self.on_ready is not None:
            together = False
        elif self._guarded:
            together = self.fold.all_in_place(delivered)
        else:
            together = self.fold.add_all(delivered, self.scale if self.closing else 1.0)
        if not together:
            for number, parameter in delivered.items():
                if parameter.grad is None and self._guarded:  # another hook has cleared it since
                    raise UsageError("gradient-cleared", parameter=self.names[number])
                self.gradient_ready(number, parameter)
            return
        for number in delivered:
            self.ready[number] = True
        if self._order is not None and self.fold.sets_order(closing=self.closing):
            self._order += delivered
        if not self.closing:
            self.state = State.ACCUMULATING
            return
        if self.state is not State.SENDING:
            self._begin_sending()
        full = False
        for number in delivered:
            if self._final[number]:
                raise self.static_graph.late(number, self.names[number])
            self._final[number] = True
            index = self._bucket_of[number].index
            self._to_come[index] -= 1
            full = full or self._to_come[index] == 0
        if full:
            self._launch_full()

    def gradient_ready(self, number: int, parameter: Tensor) -> None:
        """Count a parameter's gradient: autograd has put it into `.grad`, or something else has,
        between the last backward and `finish`.
        """
        bucket, static = self._bucket_of[number], self.static_graph
        self.reached = True
        if self._guarded and self.ready[number] and self.fold.cleared(number, adding=True):
            raise UsageError("gradient-cleared", parameter=self.names[number])
        had_all = self._final[number] or (static.on and static.has_all(number))
        if bucket.index < len(self._works) or (self.closing and had_all):
            raise static.late(number, self.names[number])
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            gradient = self._drop_graph(number, parameter)
        if gradient is not None and gradient.is_sparse and not self.fold.keeps_sparse(number):
            self._warn_once(_DENSE, number)
        if self.closing and self.state is not State.SENDING:
            self._begin_sending()
        if gradient is None and not self._guarded:  # autograd has called without a gradient
            return
        if self.on_ready is not None and gradient is not None:
            self.on_ready(number, gradient)
        final = self.closing and (not static.on or static.is_last(number))
        self.fold.add(number, self.scale if final else 1.0)
        self.ready[number] = True
        if self._order is not None and self.fold.sets_order(closing=self.closing):
            self._order.append(number)
        if final:
            self._final[number] = True
            if not bucket.sum.is_cuda:  # the hidden time is not reported for GPUs
                self.timeline.note_arrivals()
            self._to_come[bucket.index] -= 1
            if self._to_come[bucket.index] == 0:
                self._launch_full()
        elif self.state is State.IDLE:
            self.state = State.ACCUMULATING

    def _begin_sending(self) -> None:
        """Note the first gradient of a closing backward."""
        if not self._guarded:
            self.keep_accumulated()
        self.state = State.SENDING
        if self.on_first is not None:
            self.on_first()

    def keep_accumulated(self) -> None:
        """Note which of a wrapper's small gradients are ready though no bucket has them: of backwards
        that only accumulate, and of one that has left out the last of their bucket. Where they are,
        the next backward adds to them, and `finish` takes them.
        """
        for number, parameter in self._uncounted.items():
            gradient = parameter.grad
            self.ready[number] = gradient is not None
            if gradient is not None and gradient.requires_grad:
                self._drop_graph(number, parameter)
        self._uncounted.clear()

    def _drop_graph(self, number: int, parameter: Tensor) -> Tensor:
        """Detach a parameter's gradient, and warn of it once."""
        assert parameter.grad is not None
        self._warn_once(_NO_GRAPH, number)
        parameter.grad = parameter.grad.detach()
        return parameter.grad

    def _warn_once(self, text: str, number: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(
                text.format(self.names[number]) + ". This warning appears once.",
                LockstepWarning,
                stacklevel=2,
            )

    # -- the sum ----------------------------------------------------------------------------------

    def _launch_full(self) -> None:
        """Launch the buckets that wait for no gradient, in the order of their numbers."""
        while len(self._works) < len(self.buckets) and self._to_come[len(self._works)] == 0:
            self._launch_next()

    @property
    def all_launched(self) -> bool:
        """Whether every bucket of the closing backward was launched."""
        return len(self._works) == len(self.buckets)

    def _launch_next(self) -> None:
        bucket = self.buckets[len(self._works)]
        self.fold.complete(bucket)
        if self.on_launch is not None:
            self.on_launch(bucket)
        if bucket.flag is not None:
            bucket.flag.fill_(self._missing())
        if bucket.index == 0:
            self.timeline.reset()
        self._works.append(self.reduction.start(bucket))
        self.timeline.launched(self._works[-1])
        self._versions.append(bucket.sum._version)

    def finish(self, send: Callable[[], None] = lambda: None) -> None:
        """Launch the remaining buckets in order, and wait until every gradient is the sum over all
        ranks. A gradient that never came is zero. `send` starts messages that travel behind the
        buckets.
        """
        if not self._guarded:
            self.keep_accumulated()
        self.timeline.backward_is_over()
        self.filled_here = [False] * len(self.parameters)
        for bucket in self.buckets[len(self._works) :]:
            self._fill(bucket)
            self._launch_next()
        send()
        for number, work in enumerate(self._works):
            work.wait()
            self.timeline.waited_for(number)
        self.fold.deliver()
        self.someone_misses = self._missing_everywhere()
        self.has_finished = True
        self.ready_here = self.ready
        if self.static_graph.on:
            self.static_graph.learn()
        self.ready = [False] * len(self.parameters)
        if self._guarded:
            self.state = State.FINISHED  # `reset` begins the next window
        else:
            self._arm()

    def _fill(self, bucket: Bucket) -> None:
        """Complete the gradients of a bucket that get no further contribution in this window."""
        for span in bucket.spans:
            number = span.parameter
            if self._final[number]:
                continue
            if not self.ready[number]:
                # a gradient that was set by hand is another tensor
                unused = self._guarded and self.fold.all_in_place([number])
                self.filled_here[number] = unused or self.parameters[number].grad is None
            self.fold.fill(number, self.scale)

    def _missing(self) -> float:
        """The number of parameters without a gradient on this rank. It is 0 on a rank without a
        backward: without a micro-batch the rank cannot tell what is missing.
        """
        return 0.0 if self.state is State.IDLE else float(self.ready.count(False))

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

    def check_not_cleared(self) -> None:
        """Raise if gradients were cleared between the backward and `finish`. They belong to the
        sum, and would be lost on this rank only. Waits for no other rank.
        """
        if not self.fold.all_in_place(range(len(self.names))):
            for number, name in enumerate(self.names):
                if self.ready[number] and self.fold.cleared(number, adding=False):
                    raise UsageError("gradient-cleared", parameter=name)
        for bucket, version in zip(self.buckets, self._versions, strict=False):
            if bucket.sum._version != version:
                raise UsageError("gradient-cleared", parameter=bucket.spans[0].name)
