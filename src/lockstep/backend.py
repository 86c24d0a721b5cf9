"""Shared memory as a backend of torch.distributed: any program gets faster collectives with one
line.

    import lockstep.backend
    torch.distributed.init_process_group("lockstep")

On one x86 Linux host all_reduce, broadcast, all_gather, reduce_scatter and barrier of CPU tensors
go through shared memory. The rest, and everything elsewhere, goes through gloo. Ranks that call
different collectives raise CollectiveMismatch before any data is mixed. If a rank dies, the error
names it. A collective is done when its call returns, also with async_op=True.
"""

# torch's stubs have several forms of every method, and lack what makes a Work.
# mypy: disable-error-code="override,assignment,attr-defined,misc"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.reduce_op import OF_TORCH, Op, check_op
from lockstep.collectives.shared_memory.operations import possible
from lockstep.errors import UsageError
from lockstep.runtime.strangers import no_strangers

NAME = "lockstep"


class SharedMemoryProcessGroup(dist.ProcessGroup):
    """The process group that torch makes for `init_process_group("lockstep")`, and for its
    subgroups. Do not make one yourself.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        with no_strangers("gloo"):
            self._gloo: Any = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", store), rank, size, timeout
            )
        self._group = Group(self, ranks=tuple(range(size)), rank=rank)
        self._group.timeout = timeout
        self._name = ""
        if size > 1 and possible():
            # Programs that use torch.distributed may call one collective from different lines:
            # torch's own wrapper does.
            self._group.share_host(store, timeout, places=False)

    def getBackendName(self) -> str:  # torch's own spelling
        return NAME

    @property
    def group_name(self) -> str:
        """The name that torch registered. torch fills its own field only for backends in C++."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def shutdown(self) -> None:
        """Release the group. destroy_process_group calls this."""
        self._group.forget()

    def abort(self) -> None:
        self.shutdown()

    # -- through shared memory --------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._all_reduce("allreduce", tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._all_reduce(
            "allreduce_coalesced", tensors, opts or dist.AllreduceCoalescedOptions()
        )

    def _all_reduce(self, kind: str, tensors: list[Tensor], opts: Any) -> Any:
        if _averages_integers(opts, tensors):
            return self._divided(opts, tensors, lambda: self._all_reduce(kind, tensors, opts))
        op = _op(opts.reduceOp, tensors)
        if self._group.memory is None or op is None:
            return self._by_gloo(kind, tensors, tensors, opts)
        # as gloo: of tensors that share memory, each is summed as it was at the call
        sums = [tensor.clone() for tensor in tensors] if _overlap(tensors) else tensors
        for total in sums:
            self._group.memory.all_reduce(total, op).wait()
        for tensor, total in zip(tensors, sums, strict=True):
            if total is not tensor:
                tensor.copy_(total)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        if self._group.memory is None:
            return self._by_gloo("broadcast", tensors, tensors, opts)
        for tensor in tensors:
            self._group.memory.broadcast(tensor, opts.rootRank).wait()
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        alike = all(map(_alike, outputs, inputs))
        if self._group.memory is None or not alike:
            compared = inputs if alike else []
            return self._by_gloo("allgather", compared, outputs, inputs, *_options(opts))
        for parts, local in zip(outputs, inputs, strict=True):
            self._group.memory.all_gather(parts, local).wait()
        return _done(outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Fill `outputs[r]` with rank r's `inputs`."""
        if self._group.memory is None:
            return self._by_gloo("allgather_coalesced", inputs, outputs, inputs, *_options(opts))
        for index, local in enumerate(inputs):
            parts = [by_rank[index] for by_rank in outputs]
            self._group.memory.all_gather(parts, local).wait()
        return _done(outputs)

    def all_gather_single(self, output: Tensor, local: Tensor, opts: Any = None) -> Any:
        if self._group.memory is None or not output.is_contiguous():
            return self._by_gloo("_allgather_base", [local], output, local, *_options(opts))
        parts = output.view(self.size(), -1).unbind()
        self._group.memory.all_gather(parts, local.reshape(-1)).wait()
        return _done([output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, local in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, local, opts).wait()
        return _done(outputs)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if _averages_integers(opts, outputs):
            return self._divided(opts, outputs, lambda: self.reduce_scatter(outputs, inputs, opts))
        op = _op(opts.reduceOp, outputs)
        alike = True
        for output, parts in zip(outputs, inputs, strict=True):
            alike = alike and all(part.shape == output.shape for part in parts)
        if self._group.memory is None or op is None or not alike:
            return self._by_gloo("reduce_scatter", outputs if alike else [], outputs, inputs, opts)
        for output, parts in zip(outputs, inputs, strict=True):
            self._group.memory.reduce_scatter(output, parts, op).wait()
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, local: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if _averages_integers(opts, [output]):
            return self._divided(
                opts, [output], lambda: self.reduce_scatter_single(output, local, opts)
            )
        op = _op(opts.reduceOp, [output])
        if self._group.memory is None or op is None:
            return self._by_gloo("_reduce_scatter_base", [output], output, local, opts)
        parts = [part.view(output.shape) for part in local.reshape(self.size(), -1).unbind()]
        self._group.memory.reduce_scatter(output, parts, op).wait()
        return _done([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, local in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, local, opts).wait()
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        if self._group.memory is None:
            return self._gloo.barrier(*_options(opts))
        self._group.memory.all_reduce(torch.zeros(1), place="for barrier()").wait()
        return _done([])

    # the names of these methods before torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- through gloo -----------------------------------------------------------------------------

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        if _averages_integers(opts, tensors):
            return self._divided(opts, tensors, lambda: self.reduce(tensors, opts))
        return self._by_gloo("reduce", tensors, tensors, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self._by_gloo("gather", inputs, outputs, inputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        return self._by_gloo("scatter", outputs, outputs, inputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._by_gloo("alltoall", [], outputs, inputs, *_options(opts))

    def all_to_all_single(
        self, output: Tensor, local: Tensor, outputs: list[int], inputs: list[int], opts: Any = None
    ) -> Any:
        return self._by_gloo("alltoall_base", [], output, local, outputs, inputs, *_options(opts))

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._gloo.recv_anysource(tensors, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        if timeout is None:
            timeout = self._group.timeout
        self._gloo.monitored_barrier(timeout, wait_all_ranks)

    def _divided(self, opts: Any, tensors: Sequence[Tensor], reduce: Callable[[], Any]) -> Any:
        """Reduce to a mean of integers: their sum, divided and rounded towards zero, as NCCL does
        it. gloo refuses such a mean.
        """
        opts.reduceOp = dist.ReduceOp.SUM
        reduce().wait()
        for tensor in tensors:
            with torch.inference_mode(tensor.is_inference()):
                tensor.div_(self.size(), rounding_mode="trunc")
        return _done(tensors)

    def _by_gloo(self, kind: str, tensors: Sequence[Tensor], *arguments: Any) -> Any:
        """Compare the collective among the ranks like all others, then run it in gloo. `tensors`
        are those that must be alike on all ranks.
        """
        if self._group.fingerprints.compares:
            if tensors:
                self._group.announce(kind, tensors[0], "by gloo", None, sends=0)
            else:
                self._group.say(f"{kind} by gloo")
            self._group.wait_for_all(self._group.number)
        return getattr(self._gloo, kind)(*arguments)


def _untraced(group: type[dist.ProcessGroup]) -> None:
    """Have torch.compile run a process group's methods, and all that they call, as they are.
    Otherwise it would trace every function written in Python.
    """
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    strategy = compiler._FrameExecStrategy(skip, skip)
    for method in vars(group).values():
        if isinstance(method, FunctionType):
            compiler.set_code_exec_strategy(method.__code__, strategy)


_untraced(SharedMemoryProcessGroup)


def _averages_integers(opts: Any, tensors: Sequence[Tensor]) -> bool:
    dtype = tensors[0].dtype
    integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return integers and opts.reduceOp == dist.ReduceOp.AVG


def _alike(outputs: Sequence[Tensor], local: Tensor) -> bool:
    """Whether the ranks' outputs have the shape and dtype of this rank's input."""
    return all(output.shape == local.shape and output.dtype == local.dtype for output in outputs)


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether two of these tensors may share memory."""
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors)


def _options(opts: Any) -> tuple[Any, ...]:
    if opts is None:
        return ()
    return (opts,)


def _op(reduce_op: Any, tensors: Sequence[Tensor]) -> Op | None:
    """Return the operation if shared memory can do it, else None."""
    for torch_op, op in OF_TORCH.items():
        # compared, not looked up: torch passes another type, which equals these by its own `==`
        # only
        if reduce_op == torch_op:
            try:
                for tensor in tensors:
                    check_op(op, tensor)
            except UsageError:
                return None
            return op
    return None


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _create(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> SharedMemoryProcessGroup:
    return SharedMemoryProcessGroup(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
