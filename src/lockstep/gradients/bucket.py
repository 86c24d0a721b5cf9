"""The parameters that are trained, and the buckets of their gradients: flat tensors, of which the
parameters' `.grad` are views. Also, when each bucket was launched and when its sum arrived, and how
torch.compile cuts a model by buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple
from weakref import finalize, ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.collectives.group import Group
from lockstep.collectives.work import Handle, Work, asks
from lockstep.errors import UsageError
from lockstep.gradients.layout import FIRST_BUCKET, BucketPlan, Entry, Span

_ATTRIBUTE = "_active_ddp_module"
Named = list[tuple[str, nn.Parameter]]
_KIND = attrgetter("requires_grad", "dtype", "device")
_SECOND = 1e9  # ns


class Bucket:
    """The gradients of some parameters in one flat tensor `sum`. `views[i]` is the place of
    `spans[i]`, with the shape and strides of its parameter.

    So gradients take as much memory as the parameters, and the sum over the ranks arrives in
    `.grad` without a copy.
    """

    def __init__(
        self, plan: BucketPlan, parameters: Sequence[nn.Parameter], memory: Tensor
    ) -> None:
        self.index = plan.index
        self.spans: tuple[Span, ...] = plan.spans
        self.place = self.place_of()
        """Where in the program its sum stands, for the comparison of ranks and for errors."""
        self.sum = memory  # zeros, flat
        self.flag = None if plan.flag is None else self.sum[plan.flag : plan.flag + 1]
        self.parameters = [parameters[span.parameter] for span in plan.spans]
        self.views = [
            view_of(self.sum, span, parameter)
            for span, parameter in zip(plan.spans, self.parameters, strict=True)
        ]

    def place_of(self, forward: int | None = None) -> str:
        """Return its place. `forward`: the number of the forward that it belongs to: ranks that
        sum the gradients of different forwards are then found at once.
        """
        more = f" and {len(self.spans) - 1} more" if len(self.spans) > 1 else ""
        of = "" if forward is None else f" of forward {forward}"
        return f"for gradient bucket {self.index}{of} ({self.spans[0].name}{more})"

    def __repr__(self) -> str:
        return (
            f"Bucket({self.index}, {len(self.spans)} gradients,"
            f" {self.sum.numel() * self.sum.element_size() / 2**20:.1f} MiB {self.sum.dtype})"
        )


def bucket_of_each(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the bucket of each gradient, by the number of its parameter."""
    by_number = {}
    for bucket in buckets:
        for span in bucket.spans:
            by_number[span.parameter] = bucket
    return [by_number[number] for number in range(len(by_number))]


def view_of(flat: Tensor, span: Span, parameter: Tensor) -> Tensor:
    """A parameter's place in a flat tensor, in the parameter's shape."""
    piece = flat[span.start : span.stop]
    if not piece.numel() and parameter.numel():  # a sparse gradient has no room in the bucket
        return piece
    # Autograd keeps a gradient in its parameter's memory format. A view with the same strides
    # avoids a strided copy (channels_last).
    if _dense(parameter):
        return piece.as_strided(
            parameter.shape, parameter.stride(), storage_offset=flat.storage_offset() + span.start
        )
    return piece.view(parameter.shape)


def _dense(tensor: Tensor) -> bool:
    """Whether the strides enumerate numel() elements without gap or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


@dataclass(frozen=True, slots=True)
class _Buckets:
    bucket_bytes_cap: int


@contextmanager
def cut_by_buckets(bucket_bytes: int, *, wanted: bool = True) -> Iterator[None]:
    """Cut what is compiled in this block into graphs of about `bucket_bytes` of parameters. If not
    `wanted`, change nothing.

    torch.compile makes one backward of a whole graph, so that all gradients would land at its end.
    Inside the forward of torch's DistributedDataParallel the compiler cuts the graph where that
    wrapper's buckets end, so that gradients leave while the backward runs. It recognizes such a
    forward by a class attribute, which holds an object with `bucket_bytes_cap`. There is no public
    way to ask for the cut.
    """
    ddp: Any = nn.parallel.DistributedDataParallel
    if not wanted or not hasattr(ddp, _ATTRIBUTE):
        yield
        return
    before = getattr(ddp, _ATTRIBUTE)
    # torch refuses a cap below that of its own first bucket, after which it always cuts
    setattr(ddp, _ATTRIBUTE, _Buckets(max(bucket_bytes, FIRST_BUCKET)))
    try:
        yield
    finally:
        setattr(ddp, _ATTRIBUTE, before)


class BucketTimes(NamedTuple):
    """The times of one bucket, in seconds of this process's monotonic clock."""

    left: float
    arrived: float | None
    """None if not known yet."""


class BucketTimeline:
    """The times of one window's buckets. Looking never waits: a sum counts as arrived when somebody
    looks, or waits for it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._asks: list[Callable[[], bool] | None] = []
        self._left: list[int] = []
        self._arrived: list[int | None] = []
        self._first_open = 0  # the sums before this number have arrived
        self._over: int | None = None

    def launched(self, work: Work) -> None:
        done = asks(work) if isinstance(work, Handle) else getattr(work, "done", None)
        self._asks.append(done)
        self._left.append(time.monotonic_ns())
        self._arrived.append(None)

    def note_arrivals(self) -> None:
        """Note which sums have arrived. They arrive in the order in which they left."""
        while self._first_open < len(self._asks):
            done = self._asks[self._first_open]
            if done is None or not done():
                return
            self._arrived[self._first_open] = time.monotonic_ns()
            self._first_open += 1

    def backward_is_over(self) -> None:
        """Note that the backward has ended: from now on no communication is hidden."""
        self.note_arrivals()
        self._over = time.monotonic_ns()

    def waited_for(self, number: int) -> None:
        if self._arrived[number] is None:
            self._arrived[number] = time.monotonic_ns()

    def times(self) -> Sequence[BucketTimes]:
        """The times of all buckets, in the order in which they left."""
        times = []
        for left, arrived in zip(self._left, self._arrived, strict=True):
            seconds = None if arrived is None else arrived / _SECOND
            times.append(BucketTimes(left / _SECOND, seconds))
        return times

    def hidden(self) -> float:
        """Seconds in which at least one bucket was on its way while the backward ran. A sum that
        starts only when a rank waits for it is not hidden.
        """
        over = self._over
        if over is None:
            return 0.0
        total = reached = 0
        for done, left, arrived in zip(self._asks, self._left, self._arrived, strict=True):
            if done is not None and left < over:
                end = over if arrived is None else min(arrived, over)
                total += max(0, end - max(left, reached))
                reached = max(reached, end)
        return total / _SECOND


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


class TrainedParameters:
    """The parameters of a module that require gradients, each once, without the ignored ones
    (given by full names).
    """

    _owners: ClassVar[MutableMapping[Tensor, ref[TrainedParameters]]] = WeakIdKeyDictionary()

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self.ignored = frozenset(ignored)
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.taken_over = False
        """Whether another owner has taken charge of these parameters."""
        self._handles: list[RemovableHandle] = []
        finalize(self, _remove, self._handles).atexit = False
        # parameters that are equal on all ranks
        self._equal: MutableMapping[Tensor, None] = WeakIdKeyDictionary()
        self._seen = self._state()
        for _, parameter in self.now():
            self._equal[parameter] = None

    def now(self) -> Named:
        """The names and parameters to train, as the module is now."""
        return [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and name not in self.ignored
        ]

    def take_charge(self) -> None:
        """Take charge of the parameters to train now. Two must never reduce the same gradient, so
        a former owner loses its hooks.
        """
        named = self.now()
        if not named:
            raise UsageError("no-trainable-parameter")
        self.close()
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        for parameter in self.parameters:
            owner = self._owners.get(parameter, lambda: None)()
            if owner is not None and owner is not self:
                owner.close()
                owner.taken_over = True
            self._owners[parameter] = ref(self)

    def entries(self, sizes: Sequence[int]) -> list[Entry]:
        """Return what a plan of buckets needs to know. `sizes`: elements of each gradient."""
        return [
            Entry(name, size, parameter.dtype, parameter.device)
            for name, parameter, size in zip(self.names, self.parameters, sizes, strict=True)
        ]

    def call(self, hooks: Sequence[Callable[[Tensor], None]]) -> None:
        """Have autograd call these hooks, one per parameter, when its gradient has landed."""
        self.close()
        for parameter, hook in zip(self.parameters, hooks, strict=True):
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def make_equal(self, group: Group) -> None:
        """Copy rank 0's values of parameters that have joined the training to all ranks."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter not in self._equal:
                group.broadcast(
                    parameter.detach(), place=f"for {name}, which joined the training"
                ).wait()
                self._equal[parameter] = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        _remove(self._handles)

    def changed(self) -> bool:
        """Whether a parameter was added, removed, replaced, frozen, unfrozen or given another
        dtype or device since this was last asked.
        """
        before = self._seen
        self._seen = self._state()
        return self._seen != before

    def _state(self) -> tuple[list[int], list[object]]:
        """Every parameter's identity and kind (requires_grad, dtype, device), level by level of the
        module tree. It runs in every step, so it needs no names, and no call per module.
        """
        parameters: list[nn.Parameter] = []
        modules = [self._module]
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameters.append(parameter)
            for child in module._modules.values():
                if child is not None:
                    modules.append(child)  # the loop comes to it
        return list(map(id, parameters)), list(map(_KIND, parameters))
