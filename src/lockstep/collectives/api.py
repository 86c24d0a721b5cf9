"""The collectives as functions, for users: `lockstep.collectives.all_reduce(tensor)`.

All take the same keywords:

`group`      a `lockstep.collectives.Group` (as `world.subgroup(ranks)` gives), a torch process
             group, or None: all ranks. `root` is a place in it.
`algorithm`  "native" is the backend's own collective; the others are written out (algorithms/) and
             run over messages of any backend: central (one
             rank after the other), ring, tree, recursive_doubling, halving_doubling, direct,
             hierarchical, doubling, halving. "shared_memory", where all ranks are on one CPU host,
             does all_reduce, broadcast, all_gather and reduce_scatter. "auto" chooses.
`async_op`   True returns a handle at once: `handle.wait()` gives the result, and nothing may touch
             the tensors before. Several may be in
             flight; all ranks issue the same ones in the same order.
`op`         sum, mean, max, min, prod or a torch ReduceOp. A mean divides once, at the end, and is
             refused for integers.

All ranks of the group call the same collective, from the same line. On one host, other shapes,
dtypes or orders raise CollectiveMismatch on all ranks before anything is sent; a rank that dies
raises PeerFailed on the others. Any dtype that torch adds up, any strides, also empty and 0-d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives import by_schedule, native
from lockstep.collectives.algorithms import Algorithm, check_algorithm
from lockstep.collectives.group import Group
from lockstep.collectives.reduce_op import OF_TORCH, Op
from lockstep.collectives.schedule import Kind
from lockstep.collectives.work import Handle, Later, Work
from lockstep.errors import UsageError

SHARED_MEMORY = "shared_memory"
C = TypeVar("C", bound=Callable[..., Any])
AnyGroup = Group | dist.ProcessGroup | None
AnyOp = Op | dist.ReduceOp | Any  # torch's ReduceOp.SUM is of another, hidden type


def of_ordinary_tensors(collective: C) -> C:
    """Have a collective of `tensor` or `tensors`, its first argument, see ordinary tensors.
    Without inference mode nothing is copied.

    A tensor that torch.inference_mode made can be written to in that mode only, and threads have
    modes of their own. So a collective works on copies, and its result is copied to where it
    belongs.
    """

    @wraps(collective)
    def call(*args: Any, **options: Any) -> Any:
        name = "tensor" if "tensor" in options else "tensors"
        if name in options:
            args = (options.pop(name), *args)
        given = args[0] if args else None
        each = (given,) if isinstance(given, Tensor) else given or ()
        if not torch.is_inference_mode_enabled() and not any(one.is_inference() for one in each):
            return collective(*args, **options)
        with torch.inference_mode(False):
            copies = [one.clone() for one in each]
            plain = copies[0] if isinstance(given, Tensor) else given and copies
            answer = collective(*([plain] if args else []), *args[1:], **options)

        def result(found: Any) -> Any:
            if found is not plain or given is None:
                return found
            with torch.inference_mode():
                return given.copy_(plain)

        if options.get("async_op"):
            return Handle([answer], lambda: result(answer.wait()))
        return result(answer)

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
    """Replace `tensor` on every rank by the sum (mean, max, min, prod) over all ranks, in place;
    return it, or a handle.
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
    """Replace `tensor` on every rank by that of rank `root` of the group, in place; return it,
    or a handle.
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
    """Replace `tensor` on rank `root` by the sum (mean, ...) over all ranks; on the others it
    stays as it is. Return it, or a handle.
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
    """Every rank's tensor, joined along dim 0 in the order of ranks (0-d: one element a rank), or
    with `as_list` one tensor for each.

    Dim 0 may have another length on each rank, which costs one small message more to find out. Or a
    handle, with `async_op`.
    """

    def shaped(pieces: list[Tensor]) -> Any:
        if as_list:
            return pieces
        return torch.cat(pieces) if tensor.dim() else torch.stack(pieces)

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
    """This rank's rows of the sum (mean, ...) over all ranks, as a new tensor, or a handle.
    `tensor` stays as it is.

    Rows are cut as `torch.tensor_split` cuts them: where their number does not divide, the first
    ranks get one more.
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
    """This rank's tensor of the list that rank `root` gives, one for each rank, or a handle. The
    others give None. Shapes may differ.
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
    """On rank `root` a list of every rank's tensor, elsewhere None; or a handle. Dim 0 may have
    another length on each rank.
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
    """A list of what each rank has for this one, or a handle: `tensors[r]` goes to rank r of the
    group. Shapes may differ, the dtype not.
    """
    return _start("all_to_all", tensors, (), algorithm, group, async_op)


def resolve(group: AnyGroup) -> Group:
    """The Group that is meant, open: every member asks. Raises UsageError for one that this rank
    is not in.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        return Group.default().open()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError("not-a-member")
    return Group.of(group).open()


def _op(op: AnyOp) -> Any:
    """The name of an operation; what is unknown is refused where it is used."""
    if isinstance(op, str):
        return op
    return OF_TORCH.get(op, str(op))


def _start(
    kind: Kind,
    given: Tensor | Sequence[Tensor] | None,
    options: tuple[Any, ...],
    algorithm: str,
    group: AnyGroup,
    async_op: bool,
    shaped: Callable[[Any], Any] | None = None,
) -> Any:
    """The collective of that kind: its result, `shaped`, or a handle of it."""
    found = resolve(group)
    name = _choose(found, kind, algorithm, given)
    if name in ("native", SHARED_MEMORY):
        memory = {"memory": native.memory_of(found)} if name == SHARED_MEMORY else {}
        work: Work = getattr(native, kind)(found, given, *options, **memory)
    else:
        # What other ranks are told of the algorithm must be the same where it was chosen; else
        # it follows from what is the same.
        label = "" if algorithm == "auto" else f" by {algorithm}"
        run = getattr(by_schedule, kind)(found, given, *options, name, label)
        work = Later(found.in_background(run)) if async_op else Handle([], run)
    handle = work if shaped is None else Handle([work], lambda: shaped(work.wait()))
    return handle if async_op else handle.wait()


def _choose(
    group: Group, kind: Kind, algorithm: str, given: Tensor | Sequence[Tensor] | None
) -> str:
    in_memory = algorithm == "auto" and group.memory is not None
    if kind in native.IN_MEMORY and (in_memory or algorithm == SHARED_MEMORY):
        return SHARED_MEMORY
    if algorithm == "auto":
        # not nbytes, which a sparse tensor refuses: it is named where the operation is checked
        size = given.numel() * given.element_size() if isinstance(given, Tensor) else 0
        return group.tuning.choose(kind, size, group.size)
    check_algorithm(kind, algorithm, "auto", "native")
    return algorithm
