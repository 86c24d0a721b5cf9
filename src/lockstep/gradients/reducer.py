"""The Reducer: gradients land in buckets, full buckets leave while backward goes on, `finish` makes the sum complete.

Two doors lead here. The drop-in wrapper finishes at the end of each backward and divides by the world size; the Stepper finishes
once a window and divides by its weight. The Reducer knows neither optimizer nor loss nor window: it only sums.

Correctness is in `finish`: what has not left goes then, a gradient that never came counts as zero. `closing` (may full buckets
leave during this backward?) is only an optimisation of it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep import status
from lockstep.collectives.group import Group, Work
from lockstep.data.windows import Cut
from lockstep.errors import LateGradient, LockstepWarning, UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.departures import Departures
from lockstep.gradients.fold import Fold, InPlace
from lockstep.gradients.layout import BUCKET, FIRST_BUCKET, Entry, Layout, plan
from lockstep.gradients.reductions import Reduction
from lockstep.gradients.static_graph import StaticGraph
from lockstep.gradients.trainable import Trainable

_MISSING = "for the number of missing gradients"
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")

CLEARED = (
    "the gradient of {!r} was cleared, replaced or added to between stepper.backward() and stepper.step(), when it belonged to the sum over "
    "all ranks: leave out zero_grad() (every window begins with cleared gradients) and other backwards"
)
_LATE = (
    "a second gradient of {!r} arrived in one window's last backward, when its sum was on its way to the other ranks. "
    "Usual causes: two backwards (add the losses and call backward once); a block used twice under reentrant checkpointing "
    "(static_graph=True with the wrapper, or use_reentrant=False)"
)
_NO_GRAPH = (
    "backward(create_graph=True): the graph on the gradient of {!r} does not reach the other ranks, and their mean has none: take derivatives of "
    "gradients with torch.autograd.grad"
)
_DENSE = (
    "the gradient of {!r} is sparse, and is summed and given to the optimizer as a dense one. lockstep.DistributedDataParallel without a Stepper "
    "keeps the gradients of nn.Embedding(sparse=True) sparse"
)


class Reducer:
    """The gradients of one model's trainable parameters, summed over the ranks of a group.

    `finish`, and `reset` or `renew` before the next window, are collective: every rank of the group calls them.
    """

    _owners: ClassVar[MutableMapping[Tensor, ref[Reducer]]] = WeakIdKeyDictionary()

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
        self._fold = fold or InPlace()
        self.closing = False
        self.guarded = False  # by a Stepper: only gradients of its own backward count, and nobody clears them before `finish`
        self.expecting = True  # a backward whose gradients count is running
        self.stray = False  # a gradient arrived that was not expected
        self.scale = 1.0  # what each gradient is multiplied by as it leaves: 1, or the wrapper's 1 / world size
        self.end_of_backward: Callable[[], None] | None = None  # called once after a closing backward (the wrapper's door)
        self.on_landed: Callable[[int, Tensor], None] | None = None  # shown each gradient, with its parameter's number, before it is summed
        self.ignored = frozenset(ignored)
        self.generation = 0  # how often the model's parameters have changed
        self.layouts = 0  # how often buckets were laid
        self.someone_misses = 0.0  # after `finish`: above 0 where a rank had parameters without a gradient
        self.bucket_bytes = bucket_bytes
        self._caps = bucket_caps or (min(FIRST_BUCKET, bucket_bytes), bucket_bytes)
        self.static_graph = StaticGraph()
        self._known: MutableMapping[Tensor, None] = WeakIdKeyDictionary()  # parameters that have been made equal on all ranks
        self.departures = Departures()  # of the window that is open, or was finished last
        self._said: set[str] = set()
        self._taken = False
        self._first = 0  # the rank that has slot 0 of the window
        self._here: list[bool] = []
        self._filled: list[bool] = []
        self.parameters: list[nn.Parameter] = []
        self._trainable = Trainable(module, ignored)
        self._handles: list[RemovableHandle] = []
        self._take()
        for parameter in self.parameters:
            self._known[parameter] = None

    # -- parameters and buckets ----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Take charge of the module's trainable parameters."""
        named = self._trainable.named()
        if not named:
            raise UsageError("the model has no parameter with requires_grad=True: there is nothing to train")
        self.close()
        landed = {id(parameter) for parameter, here in zip(self.parameters, self._here, strict=True) if here}
        self.generation += 1
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        for parameter in self.parameters:
            owner = self._owners.get(parameter, lambda: None)()
            if owner is not None and owner is not self:
                owner._give_up()
        self.static_graph.forget()
        self._arrivals: list[int] | None = []  # the order of one backward of the first window; None once the buckets follow it
        self._finished = False  # at least one window has been summed
        self._here = [id(parameter) in landed for parameter in self.parameters]  # landed in this window
        self._build(list(reversed(range(len(named)))))
        for number, parameter in enumerate(self.parameters):
            self._owners[parameter] = ref(self)
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._landed, number)))

    def _follow_model(self) -> None:
        """Take charge of what is trained now. All frozen for a while (a discriminator in the generator's step): nothing is to be done."""
        named = self._trainable.named()
        if not named and not self.guarded:
            return
        if [id(parameter) for _, parameter in named] == list(map(id, self.parameters)) and self._entries() == self._laid:
            return
        self._take()
        for name, parameter in named:
            if parameter not in self._known:
                self.group.broadcast(parameter.detach(), place=f"for {name}, which joined the training").wait()
                self._known[parameter] = None

    def _give_up(self) -> None:
        """Another Reducer takes these parameters: two must never reduce the same gradient."""
        self.close()
        self._taken = True

    def _entries(self) -> list[Entry]:
        return [
            Entry(name, room, parameter.dtype, parameter.device)
            for name, parameter, room in zip(self.names, self.parameters, self._fold.room(self.parameters), strict=True)
        ]

    def _build(self, order: Sequence[int]) -> None:
        """Lay the buckets; gradients that are there move into them."""
        self.layouts += 1
        entries = self._laid = self._entries()
        self.layout: Layout = plan(entries, order, caps=self._caps)
        self.buckets: list[Bucket] = []  # what nobody holds any more goes before the new memory comes
        self._home: list[Bucket] = []  # by parameter
        memory = self.reduction.memory(self.layout)
        self.buckets = [Bucket(bucket, self.parameters, room) for bucket, room in zip(self.layout.buckets, memory, strict=True)]
        homes = {span.parameter: bucket for bucket in self.buckets for span in bucket.spans}
        self._home = [homes[number] for number in range(len(entries))]
        self._fold.lay(self.buckets, self.parameters)
        self._works: list[Work] = []
        self._versions: list[int] = []  # of the sums that have left, to see whether somebody writes to them
        self._arm()

    def dense(self) -> None:
        """From now on gradients of all parameters lie in buckets. Every rank calls it alike."""
        self._fold = InPlace()
        self._build(self.layout.order)

    def _arm(self) -> None:
        """Be ready for a closing backward."""
        self._under_way = self._began = False
        self.static_graph.begin(len(self.parameters))
        self._closed = [False] * len(self.parameters)  # landed in its closing backward, and scaled
        self._expected = [len(bucket.spans) for bucket in self.buckets]  # still to land in the closing backward
        self._works.clear()
        self._versions.clear()

    def reset(self, cut: Cut | None = None) -> None:
        """Forget all gradients: a new window begins, which is cut like this where its micro-batches have numbers."""
        for parameter in self.parameters:
            parameter.grad = None
        self._here = [False] * len(self.parameters)
        self.renew()
        self._first = 0 if cut is None or self.group.size == 1 else cut.first(self.group.size)
        if self._fold.begin(cut):
            self._build(self.layout.order)
        self._arm()

    def renew(self) -> None:
        """Before a forward: follow the model where its parameters have changed, else, once, the order in which gradients arrive.

        Parameters that are new here (added to the model, or unfrozen) are made equal to rank 0's. What an exception in a backward left
        behind is cleared away: the sums that had left are waited for and forgotten.
        """
        if self._taken:
            raise UsageError(
                "another Stepper or DistributedDataParallel has been made for these parameters since, and reduces their gradients: use that one"
            )
        if self._under_way or self._began:
            for work in self._works:
                work.wait()
            self._arm()
        if self._trainable.changed():
            self._follow_model()
        elif self._finished and self._arrivals is not None:
            self._follow_arrivals(self._arrivals)

    def _follow_arrivals(self, arrived: list[int]) -> None:
        """Lay the buckets in the order in which gradients arrived in the first window, on the rank of slot 0, so that they fill one by one."""
        self._arrivals = None
        last = list(dict.fromkeys(reversed(arrived)))[::-1]  # a parameter's last gradient counts
        order = list(dict.fromkeys([*last, *self.layout.order]))
        message = torch.tensor(order, dtype=torch.int64, device=self.parameters[0].device)
        self.group.broadcast(message, self._first, place="for the order of gradients").wait()
        if (order := message.tolist()) != list(self.layout.order):
            self._build(order)

    @property
    def has_finished(self) -> bool:
        """Whether a window of these parameters has been summed."""
        return self._finished

    @property
    def order(self) -> list[str]:
        """The parameters' names in the order in which their gradients lie in buckets."""
        return [self.names[number] for number in self.layout.order]

    def lay(self, names: Sequence[str]) -> None:
        """Lay the buckets in this order, as another process did, and keep it. Every rank calls it alike. Raises UsageError for other names."""
        if sorted(names) != sorted(self.names):
            raise UsageError(f"the order of gradients is another model's: {', '.join(sorted(set(names) ^ set(self.names)))}")
        numbers = {name: number for number, name in enumerate(self.names)}
        self._arrivals = None
        if list(names) != self.order:
            self._build([numbers[name] for name in names])

    # -- one backward --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def window(self, *, last: bool) -> Iterator[None]:
        """Say whether full buckets may leave during the backwards in this block."""
        before, self.closing = self.closing, last
        self._fold.open()
        try:
            yield
        finally:
            self.closing = before
        if not last:
            self._fold.shut()

    def _landed(self, number: int, parameter: Tensor) -> None:
        if not self.expecting:
            self.stray = True
            return
        bucket = self._home[number]
        if self.guarded and self._here[number] and self._fold.cleared(number, landing=True):
            raise UsageError(CLEARED.format(self.names[number]))
        if bucket.index < len(self._works) or (self.closing and (self._closed[number] or self.static_graph.has_all(number))):
            raise LateGradient(self.static_graph.changed(number, self.names[number]) or _LATE.format(self.names[number]))
        if parameter.grad is not None and parameter.grad.requires_grad:
            self._say_once(_NO_GRAPH, number)
            parameter.grad = parameter.grad.detach()
        if parameter.grad is not None and parameter.grad.is_sparse and self._laid[number].numel:
            self._say_once(_DENSE, number)
        if self.closing and not self._under_way:
            self._under_way = True
            if self.end_of_backward is not None and not self._began:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if parameter.grad is None and not self.guarded:  # autograd came by without a gradient
            return
        if self.on_landed is not None and parameter.grad is not None:
            self.on_landed(number, parameter.grad)
        last = self.closing and self.static_graph.is_last(number)
        self._fold.land(number, self.scale if last else 1.0)
        self._here[number] = True
        if self._arrivals is not None and self._fold.sets_order(closing=self.closing):
            self._arrivals.append(number)
        if not last:
            return
        self._closed[number] = True
        if not bucket.sum.is_cuda:  # there nobody asks what was hidden
            self.departures.look()
        self._expected[bucket.index] -= 1
        while len(self._works) < len(self.buckets) and self._expected[len(self._works)] == 0:
            self._leave(self.buckets[len(self._works)])

    def _say_once(self, what: str, number: int) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(what.format(self.names[number]) + ". This is said once.", LockstepWarning, stacklevel=2)

    def backward_begins(self, *_: object) -> None:
        """The outermost backward has begun: its end is the end, also where reentrant checkpointing runs others inside it."""
        if self.closing and not self._began and not self._under_way and self.end_of_backward is not None:
            self._began = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def _backward_over(self) -> None:
        """Called by autograd when a backward has ended: the user's, or one that reentrant checkpointing runs inside it."""
        if len(self._works) < len(self.buckets) and _inside_checkpoint():
            self._under_way = False  # the next gradient asks to be called again
        elif self.end_of_backward is not None:
            self.end_of_backward()

    def _leave(self, bucket: Bucket) -> None:
        assert bucket.index == len(self._works), "buckets leave in index order"
        self._fold.complete(bucket)
        if bucket.flag is not None:
            bucket.flag.fill_(self._missing())
        if bucket.index == 0:
            self.departures.reset()
        self._works.append(self.reduction.start(bucket))
        self.departures.leave(self._works[-1])
        self._versions.append(bucket.sum._version)

    def take_in(self) -> None:
        """Between the last backward and `finish`: count gradients that were put into `.grad` by other hands than autograd's."""
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self._here[number]:
                if self.on_landed is not None:
                    self.on_landed(number, parameter.grad)
                self._fold.land(number, 1.0)
                self._here[number] = True

    # -- the sum -------------------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send, in order, what has not left, and wait until every gradient is the sum over all ranks. A gradient that never came is zero."""
        with status.inside("reduce"):
            self._finish()

    def _finish(self) -> None:
        self.departures.backward_is_over()
        self._filled = [False] * len(self.parameters)
        for bucket in self.buckets[len(self._works) :]:
            for span in bucket.spans:
                if not self._closed[span.parameter]:
                    self._filled[span.parameter] = self.parameters[span.parameter].grad is None and not self._here[span.parameter]
                    self._fold.fill(span.parameter, self.scale)
            self._leave(bucket)
        for number, work in enumerate(self._works):
            work.wait()
            self.departures.waited_for(number)
        self._fold.deliver()
        self.someone_misses = self._missing_everywhere()
        self._finished = True
        self._landed_here = self._here
        self.static_graph.learn()
        self._here = [False] * len(self.parameters)
        self._arm()

    def _missing(self) -> float:
        """Parameters without a gradient on this rank. One without any backward had no micro-batch: it knows nothing of what is missing."""
        return float(self._here.count(False)) if any(self._here) or self._under_way or self._began else 0.0

    def _missing_everywhere(self) -> float:
        flag = self.buckets[-1].flag
        assert flag is not None
        if self.group.host is not self.group or not self.reduction.carries_all:  # reading what travelled would wait for a GPU
            missing = torch.tensor(self._missing())
            self.group.host.all_reduce_small(missing, place=_MISSING).wait()
            count = missing.item()
        else:
            count = flag.item()
        flag.zero_()  # it is no part of the gradient's norm
        return count

    def look_for_cleared(self) -> None:
        """Between backward and `finish` the gradients belong to the sum: cleared ones would be lost on this rank only. Waits for nobody."""
        for number in range(len(self.parameters)):
            if self._here[number] and self._fold.cleared(number, landing=False):
                raise UsageError(CLEARED.format(self.names[number]))
        for bucket, version in zip(self.buckets, self._versions, strict=False):
            if bucket.sum._version != version:
                raise UsageError(CLEARED.format(bucket.spans[0].name))

    def landed_here(self) -> Sequence[bool]:
        """Of each parameter whether this rank had a gradient for it in the window that was finished last."""
        return self._landed_here

    def filled_here(self) -> Sequence[bool]:
        """Of each parameter whether its `.grad` was None on this rank when the window was finished, and became zeros."""
        return self._filled

    def close(self) -> None:
        """Take the hooks off the parameters."""
        while self._handles:
            self._handles.pop().remove()


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
