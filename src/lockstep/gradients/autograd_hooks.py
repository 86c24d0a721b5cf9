"""What a gradient means at the moment when autograd delivers it (it *lands*).

stray      no backward whose gradients count is running: noted, and left in `.grad`
cleared    an earlier gradient of this window, which belonged to the sum, was replaced: an error
late       its bucket has left, or its parameter has had its last gradient: an error
one more   further ones of its parameter may follow: added to those before
the last   its bucket waits for one gradient less, and leaves when it waits for none

A Python call per gradient takes longer than the backward of a small gradient. So autograd adds a
Stepper's small gradients in place, and only a note is made of each. The notes are processed when a
large gradient or the last one of a bucket lands, and when the backward ends.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.work import Work
from lockstep.errors import LateGradient, LockstepWarning, UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.bucket_timeline import BucketTimeline
from lockstep.gradients.fold import Fold

_SMALL = 2**17  # bytes; zeroing the place of a larger gradient costs more than a Python call
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")

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


class AutogradHooks:
    """Receives the gradients of one model. `leave` sends the next bucket; `works` are the sums of
    the buckets that have left; `timeline` notes their times.
    """

    def __init__(
        self, fold: Fold, leave: Callable[[], None], works: Sequence[Work], timeline: BucketTimeline
    ) -> None:
        self.fold, self._leave, self._works, self._timeline = fold, leave, works, timeline
        self.closing = False
        """Whether full buckets may leave during this backward."""
        # Set by a Stepper: only the gradients of its own backwards count, and clearing them before
        # `finish` is an error.
        self.guarded = False
        self.adds_in_place = False
        """Whether only autograd touches `.grad`: then a small gradient may have its place before it
        lands.
        """
        self.expecting = True  # whether a backward whose gradients count is running
        self.strayed = False  # whether an unexpected gradient has landed
        self.unfinished = 0
        """Backwards of this window that an exception ended. The gradients of such a micro-batch
        landed in part.
        """
        self.scale = 1.0
        """The factor of each gradient when it leaves: 1, or the wrapper's 1 / world size."""
        self.end_of_backward: Callable[[], None] | None = None
        """Called once after a closing backward, by the wrapper."""
        self.on_landed: Callable[[int, Tensor], None] | None = None
        """Called with each parameter's number and gradient, before the gradient is summed."""
        self.static_graph = StaticGraph()
        self.arrivals: list[int] | None = None
        """The parameters' numbers in the order in which gradients land in a backward of the first
        window. None once the buckets follow this order.
        """
        self.here: list[bool] = []
        """For each parameter, whether a gradient has landed in this window."""
        self._names: Sequence[str] = ()
        self._small: Collection[int] = ()  # gradients that have their places before they land
        # by number, the parameters whose small gradients have landed since the last look
        self._noted: dict[int, Tensor] = {}
        self._home: list[Bucket] = []
        self._sizes: list[int] = []  # the number of gradients in each bucket
        self._said: set[str] = set()

    def lay(
        self, names: Sequence[str], parameters: Sequence[Tensor], buckets: Sequence[Bucket]
    ) -> list[Callable[[Tensor], None]]:
        """Give the gradients of these parameters their places in these buckets. Return the hook
        that autograd calls for each parameter.
        """
        self._names = names
        homes = {span.parameter: bucket for bucket in buckets for span in bucket.spans}
        self._home = [homes[number] for number in range(len(names))]
        small: set[int] = set()
        # the first window checks each gradient: whether it is sparse, and when it arrives
        if self.adds_in_place and self.fold.adds_in_place and self.arrivals is None:
            small = {number for number, each in enumerate(parameters) if each.nbytes <= _SMALL}
        self._small = small
        self.fold.keep(small)
        self._sizes = [len(bucket.spans) for bucket in buckets]
        self.arm()
        noted = small - {bucket.spans[-1].parameter for bucket in buckets}
        return [
            partial(self._noted.__setitem__ if number in noted else self.landed, number)
            for number in range(len(names))
        ]

    def rest(self) -> None:
        """The sums are complete: no closing backward is under way."""
        self._under_way = self._began = False

    def arm(self) -> None:
        """Prepare for a closing backward: one during which full buckets may leave."""
        self.rest()
        self._noted.clear()
        if self.static_graph.on:
            self.static_graph.begin(len(self._names))
        # per parameter: whether its last gradient of the closing backward has landed and is scaled
        self.closed = [False] * len(self._names)
        # per bucket: how many gradients the closing backward has still to deliver
        self._expected = self._sizes.copy()

    @property
    def stray(self) -> bool:
        """Whether an unexpected gradient has landed. Ask only outside of `backward`."""
        return self.strayed or (self.guarded and bool(self._noted))

    @property
    def open(self) -> bool:
        """Whether a closing backward has begun and not ended."""
        return self._under_way or self._began

    @contextmanager
    def window(self, *, last: bool) -> Iterator[None]:
        """Set whether full buckets may leave during the backwards in this block."""
        before, self.closing = self.closing, last
        self.fold.open()
        try:
            yield
        finally:
            self.closing = before
        if not last:
            self.fold.shut()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the gradients that land in this block."""
        if self._noted:
            self.strayed = self.stray
            self._noted.clear()
        before, self.expecting = self.expecting, True
        self.unfinished += 1
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                error.add_note(_STALE)
            raise
        finally:
            if self._noted:
                self._look_through()
            self.expecting = before
        self.unfinished -= 1

    def landed(self, number: int, parameter: Tensor) -> None:
        """Handle a gradient that has landed: the parameter's hook, which autograd calls."""
        if not self.expecting:
            self.strayed = True
            return
        if not self.closing and number in self._small:
            self._noted[number] = parameter  # no bucket waits for it
            return
        if self._noted:
            self._look_through()
        self._land(number, parameter)

    def _look_through(self) -> None:
        """Count the gradients that were only noted, in the order in which they landed."""
        noted = self._noted.copy()
        self._noted.clear()
        if self.on_landed is not None or not self.fold.all_in_place(noted):
            for number, parameter in noted.items():
                if parameter.grad is None:  # another hook has cleared it after it landed
                    raise UsageError("gradient-cleared", parameter=self._names[number])
                self._land(number, parameter)
            return
        for number in noted:
            self.here[number] = True
        if self.arrivals is not None and self.fold.sets_order(closing=self.closing):
            self.arrivals += noted
        if self.closing:
            self._under_way = True
            for number in noted:
                if self.closed[number]:
                    raise self.static_graph.late(number, self._names[number])
                self.closed[number] = True
                self._expected[self._home[number].index] -= 1
            self._leave_full()

    def _land(self, number: int, parameter: Tensor) -> None:
        bucket = self._home[number]
        if self.guarded and self.here[number] and self.fold.cleared(number, landing=True):
            raise UsageError("gradient-cleared", parameter=self._names[number])
        static = self.static_graph
        if bucket.index < len(self._works) or (
            self.closing and (self.closed[number] or (static.on and static.has_all(number)))
        ):
            raise self.static_graph.late(number, self._names[number])
        if parameter.grad is not None and parameter.grad.requires_grad:
            self._say_once(_NO_GRAPH, number)
            parameter.grad = parameter.grad.detach()
        if (
            parameter.grad is not None
            and parameter.grad.is_sparse
            and not self.fold.keeps_sparse(number)
        ):
            self._say_once(_DENSE, number)
        if self.closing and not self._under_way:
            self._under_way = True
            if self.end_of_backward is not None and not self._began:
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)
        if parameter.grad is None and not self.guarded:  # autograd has called without a gradient
            return
        if self.on_landed is not None and parameter.grad is not None:
            self.on_landed(number, parameter.grad)
        last = self.closing and (not static.on or static.is_last(number))
        self.fold.land(number, self.scale if last else 1.0)
        self.here[number] = True
        if self.arrivals is not None and self.fold.sets_order(closing=self.closing):
            self.arrivals.append(number)
        if last:
            self.closed[number] = True
            if not bucket.sum.is_cuda:  # the hidden time is not reported for GPUs
                self._timeline.look()
            self._expected[bucket.index] -= 1
            self._leave_full()

    def _leave_full(self) -> None:
        while len(self._works) < len(self._expected) and self._expected[len(self._works)] == 0:
            self._leave()

    def take_in(self, number: int, gradient: Tensor) -> None:
        """Count a gradient that something other than autograd has put into `.grad`."""
        if self.on_landed is not None:
            self.on_landed(number, gradient)
        self.fold.land(number, 1.0)
        self.here[number] = True

    def _say_once(self, what: str, number: int) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(
                what.format(self._names[number]) + ". This warning appears once.",
                LockstepWarning,
                stacklevel=2,
            )

    def backward_begins(self, *_: object) -> None:
        """Have `end_of_backward` called at the end of the outermost backward, which has begun.
        Reentrant checkpointing may run other backwards inside it. What torch.autograd.grad runs,
        as for a gradient penalty, is none.
        """
        if (
            self.closing
            and not self.open
            and self.end_of_backward is not None
            and _accumulates(torch._C._current_autograd_node())
        ):
            self._began = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def _backward_over(self) -> None:
        """Handle the end of a backward: the user's, or one that reentrant checkpointing runs
        inside it. Autograd calls this.
        """
        if len(self._works) < len(self._expected) and _inside_checkpoint():
            self._under_way = False  # the next gradient queues this callback again
        elif self.end_of_backward is not None:
            self.end_of_backward()


class StaticGraph:
    """How many gradients each parameter gets in a backward, if all backwards are alike: used only
    if it is `on`.

    The first backward shows which gradient of a parameter is its last. In a graph that is not
    static, each parameter gets one.
    """

    def __init__(self) -> None:
        self.on = False
        self._times: list[int] | None = None
        self._count: list[int] = []

    def begin(self, parameters: int) -> None:
        """Prepare for a backward."""
        self._count = [0] * parameters

    def is_last(self, number: int) -> bool:
        """Count a gradient of a parameter. Return whether it is the last one: False during the
        first backward of a static graph, when this is not known yet.
        """
        self._count[number] += 1
        return self._times is not None and self._count[number] >= self._times[number]

    def has_all(self, number: int) -> bool:
        """Whether a parameter has had as many gradients as in the first backward."""
        return self._times is not None and self._count[number] == self._times[number]

    def learn(self) -> None:
        """Keep the counts of the first backward, which has ended."""
        if self.on and self._times is None:
            self._times = self._count

    def forget(self) -> None:
        """Drop the counts: the model has other parameters."""
        self._times = None

    def late(self, number: int, name: str) -> LateGradient:
        """Return the error for a gradient that comes after a parameter's last one."""
        if not self.on or self._times is None:
            return LateGradient("late-gradient", parameter=name)
        count, times = self._count[number] + 1, self._times[number]
        return LateGradient("static-graph-changed", parameter=name, count=count, times=times)


def _accumulates(output: Any) -> bool:
    """Whether the running backward adds to the `.grad` of a leaf behind this node."""
    seen, rest = {None}, [output]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            # the error: torch.autograd.grad asks for this leaf
            with suppress(RuntimeError):
                if torch._C._will_engine_execute_node(node):
                    return True
        rest += [following for following, _ in node.next_functions]
    return False


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
