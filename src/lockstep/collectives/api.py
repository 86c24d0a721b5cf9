"""The collectives as functions, for users: `lockstep.collectives.all_reduce(tensor)`.

All take the same keywords:

`group`      a `lockstep.collectives.Group` (as `world.subgroup(ranks)` returns), a torch process
             group, or None for all ranks. `root` is a rank's number in it.
`algorithm`  "native" is the backend's own collective. These are written out (algorithms/) and run
             over messages of any backend: central (one rank after the other), ring, tree,
             recursive_doubling, halving_doubling, direct, hierarchical, doubling, halving.
             "shared_memory" needs all ranks on one CPU host. It has all_reduce, broadcast,
             all_gather and reduce_scatter. "auto" chooses one of these.
`async_op`   True returns a handle at once: `handle.wait()` gives the result. Nothing may touch the
             tensors before that. Several collectives may be in flight. All ranks start the same
             ones in the same order.
`op`         sum, mean, max, min, prod or a torch ReduceOp. A mean divides once, at the end. A mean
             of integers raises UsageError.

All ranks of the group call the same collective, from the same line. On one host, a difference in
shape, dtype or order raises CollectiveMismatch on all ranks before anything is sent. If a rank
dies, the others raise PeerFailed. Tensors may have any dtype that torch adds up and any strides;
they may be empty or 0-d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import by_schedule, native
from lockstep.collectives.group import Group
from lockstep.collectives.reduce_op import OF_TORCH, Op
from lockstep.collectives.work import Handle, Later, Work
from lockstep.errors import UsageError
from lockstep.schedules.algorithms import Algorithm, check_algorithm, choose_algorithm
from lockstep.schedules.schedule import Kind

SHARED_MEMORY = "shared_memory"
C = TypeVar("C", bound=Callable[..., Any])
AnyGroup = Group | dist.ProcessGroup | None
AnyOp = Op | dist.ReduceOp | Any  # torch's ReduceOp.SUM is of another, hidden type


def of_ordinary_tensors(collective: C) -> C:
    """Let a collective run in inference mode and on inference tensors. Its first argument is
    `tensor` or `tensors`.

    A tensor made under torch.inference_mode can be written to in that mode only, and each thread
    has its own mode. So the collective works on copies, and the result is copied back. Without
    inference mode nothing is copied.
    """

    @wraps(collective)
    def call(*args: Any, **options: Any) -> Any:
        name = "tensor" if "tensor" in options else "tensors"
        if name in options:
            args = (options.pop(name), *args)
        argument = args[0] if args else None
        tensors = (argument,) if isinstance(argument, Tensor) else argument or ()
        inference = any(tensor.is_inference() for tensor in tensors)
        if not inference and not torch.is_inference_mode_enabled():
            return collective(*args, **options)
        with torch.inference_mode(False):
            plain = argument
            if isinstance(argument, Tensor):
                plain = argument.clone()
            elif argument:
                plain = [tensor.clone() for tensor in argument]
            if args:
                args = (plain, *args[1:])
            answer = collective(*args, **options)

        def copied_back(result: Any) -> Any:
            if result is not plain or argument is None:
                return result
            with torch.inference_mode():
                return argument.copy_(plain)

        if options.get("async_op"):
            return Handle([answer], lambda: copied_back(answer.wait()))
        return copied_back(answer)

    return call  # type: ignore[return-value]


@overload
def all_reduce(
    tensor: Tensor,
    op: AnyOp = ...,
    *,
    algorithm: Algorithm = ...,
    group: AnyGroup = ...,
    async_op: Literal[False] = ...,
) -> Tensor: ...
@overload
def all_reduce(
    tensor: Tensor,
    op: AnyOp = ...,
    *,
    algorithm: Algorithm = ...,
    group: AnyGroup = ...,
    async_op: Literal[True],
) -> Work: ...
@of_ordinary_tensors
def all_reduce(
    tensor: Tensor,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Tensor | Work:
    """Replace `tensor` on every rank by the sum over all ranks, in place.

    Example::

        total = lockstep.collectives.all_reduce(torch.tensor([1.0, 2.0]))
        handle = lockstep.collectives.all_reduce(total, "max", async_op=True)
        largest = handle.wait()

    Args:
        tensor: any shape, and any dtype that torch adds up; both equal on all ranks.
        op: "sum", "mean", "max", "min", "prod" or a torch ReduceOp. A mean divides once, at the
            end; a mean of integers raises UsageError.
        algorithm: "native" is the backend's own collective. "central" (one rank after the other),
            "ring", "tree", "recursive_doubling", "halving_doubling", "direct", "hierarchical",
            "doubling" and "halving" are written out and run over messages. "shared_memory" needs
            all ranks on one CPU host; it has all_reduce, broadcast, all_gather and reduce_scatter.
            "auto" chooses.
        group: a `Group`, as `World.subgroup` gives it, a torch process group, or None for all
            ranks.
        async_op: return a handle at once; `handle.wait()` gives the result. Nothing may touch the
            tensors before that. All ranks start the same collectives in the same order.

    Returns:
        `tensor`, or a handle with `async_op`.

    Raises:
        UsageError: a value that cannot work, such as an algorithm that this collective does not
            have.
        CollectiveMismatch: on all ranks of one host, if they call different collectives, or give
            different shapes or dtypes. Nothing is sent then.
        PeerFailed: another rank has died.
    """
    return _start("all_reduce", tensor, (_op(op),), algorithm, group, async_op)  # type: ignore[no-any-return]


@of_ordinary_tensors
def broadcast(
    tensor: Tensor,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Replace `tensor` on every rank by the tensor of rank `root`, in place.

    Args:
        tensor: any dtype and any shape, both equal on all ranks.
        root: the rank that sends, as its number in the group.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        `tensor`, or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("broadcast", tensor, (root,), algorithm, group, async_op)


@of_ordinary_tensors
def reduce(
    tensor: Tensor,
    root: int = 0,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Replace `tensor` on rank `root` by the sum over all ranks. The other ranks keep theirs.

    Args:
        tensor: any shape, equal on all ranks.
        root: the rank that receives, as its number in the group.
        op: as for `all_reduce`.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        `tensor`, or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("reduce", tensor, (root, _op(op)), algorithm, group, async_op)


@of_ordinary_tensors
def all_gather(
    tensor: Tensor,
    *,
    as_list: bool = False,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Collect every rank's tensor on every rank.

    Args:
        tensor: of shape [n, ...], where n may differ between ranks; or 0-d. The ranks first
            exchange their shapes, in one small message.
        as_list: return one tensor for each rank.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        The tensors joined along dim 0 in the order of ranks (0-d: one element a rank), or a list of
        them; or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """

    def shaped(pieces: list[Tensor]) -> Any:
        if as_list:
            return pieces
        if tensor.dim():
            return torch.cat(pieces)
        return torch.stack(pieces)

    return _start("all_gather", tensor, (), algorithm, group, async_op, shaped)


@of_ordinary_tensors
def reduce_scatter(
    tensor: Tensor,
    op: AnyOp = "sum",
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Add up `tensor` over all ranks, and give each rank its rows of the sum.

    Rows are cut as `torch.tensor_split` cuts them: the first ranks get one row more if the
    number of ranks does not divide n.

    Args:
        tensor: of shape [n, ...], the same on all ranks. It is not changed.
        op: as for `all_reduce`.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        This rank's rows as a new tensor, or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("reduce_scatter", tensor, (_op(op),), algorithm, group, async_op)


@of_ordinary_tensors
def scatter(
    tensors: Sequence[Tensor] | None = None,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Give each rank one tensor of a list that rank `root` has.

    Args:
        tensors: on `root` a list with one tensor for each rank, elsewhere None. Shapes may differ.
        root: the rank that sends, as its number in the group.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        This rank's tensor, or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("scatter", tensors, (root,), algorithm, group, async_op)


@of_ordinary_tensors
def gather(
    tensor: Tensor,
    root: int = 0,
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Collect every rank's tensor on rank `root`.

    Args:
        tensor: of shape [n, ...]; n may differ between the ranks.
        root: the rank that receives, as its number in the group.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        On `root` a list with one tensor for each rank, elsewhere None; or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("gather", tensor, (root,), algorithm, group, async_op)


@of_ordinary_tensors
def all_to_all(
    tensors: Sequence[Tensor],
    *,
    algorithm: Algorithm = "auto",
    group: AnyGroup = None,
    async_op: bool = False,
) -> Any:
    """Send one tensor from each rank to each rank.

    Args:
        tensors: `tensors[r]` goes to rank r of the group. Shapes may differ, the dtype may not.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        A list of the tensors sent to this rank, one from each rank; or a handle with `async_op`.

    Raises:
        UsageError, CollectiveMismatch, PeerFailed: as for `all_reduce`.
    """
    return _start("all_to_all", tensors, (), algorithm, group, async_op)


def resolve(group: AnyGroup) -> Group:
    """Return the open Group that `group` stands for. Every member calls this. Raises UsageError if
    this rank is not a member.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        return Group.default().open()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("not-a-member")
    return Group.of(group).open()


def _op(op: AnyOp) -> Any:
    """Return the name of an operation. An unknown one is refused where it is used."""
    if isinstance(op, str):
        return op
    return OF_TORCH.get(op, str(op))


def _start(
    kind: Kind,
    tensors: Tensor | Sequence[Tensor] | None,
    options: tuple[Any, ...],
    algorithm: str,
    group: AnyGroup,
    async_op: bool,
    shaped: Callable[[Any], Any] | None = None,
) -> Any:
    """Start a collective of that kind. Return its result, `shaped`, or a handle with `async_op`."""
    members = resolve(group)
    name = _choose(members, kind, algorithm, tensors)
    work: Work
    if name == "native":
        work = getattr(native, kind)(members, tensors, *options)
    elif name == SHARED_MEMORY:
        memory = native.memory_of(members)
        work = getattr(native, kind)(members, tensors, *options, memory=memory)
    else:
        # An algorithm that the caller chose must be equal on all ranks, so they compare it. One
        # that "auto" chose follows from what they compare anyway.
        label = "" if algorithm == "auto" else f" by {algorithm}"
        run = getattr(by_schedule, kind)(members, tensors, *options, name, label)
        work = Later(members.in_background(run)) if async_op else Handle([], run)
    handle = work if shaped is None else Handle([work], lambda: shaped(work.wait()))
    if async_op:
        return handle
    return handle.wait()


def _choose(
    group: Group, kind: Kind, algorithm: str, tensors: Tensor | Sequence[Tensor] | None
) -> str:
    in_memory = algorithm == "auto" and group.memory is not None
    if kind in native.IN_MEMORY and (in_memory or algorithm == SHARED_MEMORY):
        return SHARED_MEMORY
    if algorithm == "auto":
        # not nbytes, which raises an error for a sparse tensor; check_op raises one that names it
        size = 0
        if isinstance(tensors, Tensor):
            size = tensors.numel() * tensors.element_size()
        return choose_algorithm(kind, size, group.size)
    check_algorithm(kind, algorithm, "auto", "native")
    return algorithm
