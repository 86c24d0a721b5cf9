"""A drop-in replacement for torch's DistributedDataParallel: wrap a module, call backward, and
`.grad` is the mean over all ranks.

    model = lockstep.DistributedDataParallel(net)
    loss.backward()                  # sends gradients bucket by bucket while it runs; they are
                                     averaged when it returns
    optimizer.step()

It divides by the world size, as torch's class does. This is the mean over all samples only if every
rank has the same number of samples; else it is a mean of means. The Stepper divides by the sum of
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils._pytree import tree_leaves

from lockstep.checks.start import compare_start, model_fields
from lockstep.checks.trainable import check_trained
from lockstep.config import knob
from lockstep.errors import UsageError
from lockstep.gradients.bucket import cut_by_buckets
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.running_statistics import BufferHook, average_buffers, replicate
from lockstep.gradients.torch_hook import TorchHook, check_hook
from lockstep.runtime import status
from lockstep.step.averaging import Averaging, Uneven
from lockstep.step.wrapper_arguments import (
    Checks,
    bucket_caps,
    buffer_policy,
    check_checks,
    check_use,
    device_of,
    group_of,
    inputs_on,
    refuse,
)
from lockstep.world.world import World

_TIED = ("_world", "group", "process_group", "device_mesh", "_averaging")
_TORCHS = nn.parallel.DistributedDataParallel


class DistributedDataParallel(nn.Module, Joinable):
    """Averages the gradients of `module` over all ranks at the end of each backward.

    It takes the place of torch's class of this name, with the same keywords.

    Example::

        model = lockstep.DistributedDataParallel(Net())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    Args:
        module: the module to train.
        device_ids, output_device: the module's GPU; an error for a module on a CPU. They are not
            needed: the wrapper uses the device of the module.
        dim: must be 0, torch's default.
        broadcast_buffers: torch's older name of `forward_sync_buffers`.
        init_sync: False skips the comparison of the ranks and the broadcast from rank 0.
        process_group: the ranks to average over, as a process group.
        bucket_cap_mb: maximum size of a bucket in MiB. Default: 25.
        find_unused_parameters: accept a parameter that gets no gradient on any rank; its `.grad`
            stays None. Without it, that is an error at the end of the backward.
        check_reduction: no effect, as in torch's class.
        gradient_as_bucket_view: always true: gradients are views of the buckets, and take as much
            memory as the parameters.
        static_graph: accept unused parameters, and promise that every backward is like the first. A
            block may then be used several times under reentrant checkpointing.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision: not supported; a
            value raises UsageError.
        device_mesh: the ranks to average over, as a mesh of one axis.
        skip_all_reduce_unused_params, batched_grad_copy: no effect; this class does not do the work
            that they save.
        bucket_cap_mb_list: maximum size of each bucket in MiB, in the order of sending.
        forward_sync_buffers: every forward begins with rank 0's buffers on all ranks. With False
            each rank keeps its own, and `sync_buffers()` averages BatchNorm's statistics.
        checks: "full" compares the replicas at the forwards after steps 1, 2 and every 100th;
            "start" only compares the set-up; "off" compares nothing.
        reduce: the algorithm that sums gradients: "auto", "native", "central", "ring", "tree",
            "halving_doubling", "shared_memory" or "hierarchical".
        world: default: the world of torch's process group.
        more: other keywords raise an error, which names the Stepper for its options.

    The hooks are on the parameters. So gradients of a forward through `.module` are averaged too,
    the output may have any type, and several forwards may precede one backward. Parameters may be
    frozen, unfrozen and added between steps. Clipping, weights and sharded updates concern a whole
    step and need a Stepper. The guide lists the differences from torch's class (torch-ddp).

    Raises:
        UsageError: an invalid value.
        ReplicaDivergence, UnusedParameters: on all ranks.
    """

    broadcast_bucket_size = 250 * 2**20  # torch's value, for code that reads this attribute
    gradient_as_bucket_view = True
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        _TORCHS._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(_TORCHS._get_data_parallel_params)

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        checks: Checks = "full",
        reduce: str = "auto",
        world: World | None = None,
        **more: object,
    ) -> None:
        super().__init__()
        more |= {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
        }
        refuse(more, dim)
        check_checks(checks)
        # torch's wrapper has this attribute too
        self.parameters_to_ignore = frozenset(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        if isinstance(module, (_TORCHS, DistributedDataParallel)):
            raise UsageError("already-wrapped", module="the module")
        world = world or World.current()
        check_trained(module, world.device, self.parameters_to_ignore)
        self.device = device_of(module, device_ids, output_device)
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in bucket_cap_mb_list or ()]
        self._caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        policy = buffer_policy(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = policy.forward
        self._checks = checks
        self._reduce = reduce
        self._tie(
            world,
            process_group,
            device_mesh,
            init_sync=init_sync,
            buffers=policy.at_start,
        )

    def _tie(
        self,
        world: World,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        init_sync: bool,
        buffers: bool,
    ) -> None:
        """Connect the module to the ranks of a group: compare the ranks, broadcast rank 0's model,
        and register the reducer. All ranks call it.
        """
        Joinable.__init__(self)
        self.is_copy = False
        self._default_group = process_group is None and device_mesh is None
        self._world = world
        self.device_mesh = device_mesh
        self.group = group_of(world, process_group, device_mesh)
        self.process_group = self.group.process_group
        if init_sync:
            if self._checks != "off":
                compare_start(self.group, model_fields(self.module, self.ignored))
            replicate(self.module, self.group, self.ignored, buffers=buffers)
        self._averaging: Averaging | None = Averaging(
            self.module,
            self.group,
            reduce=self._reduce,
            caps=self._caps,
            ignored=self.ignored,
            compares=self._checks == "full",
            may_be_unused=self.find_unused_parameters or self.static_graph,
            static_graph=self.static_graph,
            shares_buffers=self.forward_sync_buffers,
        )
        world.last_comparison.add(self._averaging.last_digests)

    # -- names that code for torch's wrapper reads ------------------------------------------------

    @property
    def ignored(self) -> frozenset[str]:
        """Full names of the parameters and buffers that are not synchronized."""
        return self.parameters_to_ignore

    @property
    def broadcast_buffers(self) -> bool:
        """The same as `forward_sync_buffers`: torch's older name."""
        return self.forward_sync_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """The maximum size of a bucket in bytes, except for the first buckets."""
        return self._caps[-1]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward is reduced: False inside `no_sync`."""
        return self._averaging is not None and self._averaging.reducer.closing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._averaging is not None:
            self._averaging.reducer.closing = value

    @property
    def divisor(self) -> float:
        """The number by which the sum over all ranks is divided. Default: the world size, as in
        torch. If the losses are sums over samples or tokens, set it to their number on all ranks.
        Set it before a backward, to the same value on every rank.
        """
        return 1 / self._tied("divisor").reducer.scale

    @divisor.setter
    def divisor(self, value: float) -> None:
        reducer = self._tied("divisor").reducer
        if isinstance(reducer.reduction, TorchHook):
            raise UsageError("divisor-with-hook")
        reducer.scale = 1 / knob.number("divisor", value, above=0)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether buffers may differ between ranks, because the last forward trained."""
        return self._averaging is None or self._averaging.follows_backward

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        if self._averaging is not None:
            self._averaging.follows_backward = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts the buffers. It need not after a forward without a
        backward: they are still equal.
        """
        return self._averaging is not None and self._averaging.will_share_buffers()

    @property
    def _authoritative_rank(self) -> int:
        return 0 if self._averaging is None else self._averaging.authoritative_rank

    def _set_static_graph(self) -> None:
        if self._averaging is not None:
            if self._averaging.reducer.has_finished:
                raise UsageError("static-graph-too-late")
            self._averaging.set_static_graph()
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        if self._averaging is not None:
            self._averaging.reducer.close()

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor], bucket_size: int = 0, authoritative_rank: int = 0
    ) -> None:
        self._tied("_default_broadcast_coalesced()").buffers.broadcast(bufs, authoritative_rank)

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: BufferHook,
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        self._tied("_register_buffer_comm_hook()").buffers.register(
            state, hook, after_forward=comm_hook_location == _BufferCommHookLocation.POST_FORWARD
        )

    def _tied(self, call: str) -> Averaging:
        """Return the Averaging. Raises UsageError, naming `call`, if a Stepper has taken over."""
        if self._averaging is None:
            raise UsageError("wrapper-belongs-to-a-stepper", call=call)
        return self._averaging

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy (copy.deepcopy, torch.save), without the reducer and the
        process groups.
        """
        return {**self.__dict__, **dict.fromkeys(_TIED, None), "is_copy": True}

    def _tie_copy(self) -> None:
        """Connect a copy that is trained to the default group. torch's does so when unpickled."""
        if not self._default_group:
            raise UsageError("copy-without-its-group")
        self._tie(World.current(), init_sync=False, buffers=False)

    # -- forward and backward ---------------------------------------------------------------------

    # recursive=False: torch.compile of the wrapper compiles the module
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._ready(args, kwargs)
        with cut_by_buckets(
            self.bucket_bytes_cap, wanted=self.group is not None and self.group.size > 1
        ):
            output = self.module(*args, **kwargs)
        return self._after_forward(output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs on the module's device. Prepare the reducer if the backward of this
        forward will be reduced.
        """
        status.enter("forward")
        if (
            self.is_copy
            and self.training
            and torch.is_grad_enabled()
            and any(parameter.requires_grad for parameter in self.parameters())
        ):
            self._tie_copy()
        moved = inputs_on(self.device, self._world, args, kwargs)
        averaging = self._averaging
        if averaging is None:
            return moved
        joining = averaging.joining
        reduced = (
            torch.is_grad_enabled()
            and averaging.reducer.closing
            # Use the module's mode: Lightning leaves the wrapper in eval mode after validation.
            # Two backwards without a forward in train mode between them: training in eval mode.
            and (self.module.training or averaging.unchecked > 1 or joining is not None)
        )
        if joining is not None:
            Join.notify_join_context(self)
            joining.count(True, reduced)
        if reduced:
            check_use(self.module if averaging.unchecked == 0 else None)
            averaging.before_forward()
        averaging.share_buffers(after_forward=False)
        return moved

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, output: Any) -> Any:
        averaging = self._averaging
        if averaging is None:
            return output
        averaging.share_buffers(after_forward=True)
        averaging.follows_backward = torch.is_grad_enabled() and averaging.reducer.closing
        if averaging.follows_backward and (self.static_graph or self.find_unused_parameters):
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(averaging.backward_end.begins)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block a backward only adds to `.grad`. The first backward after the block
        averages the sum.

        Only the backward must be inside. The old state is restored at the end, also after an
        exception.
        """
        reducer = self._tied("no_sync()").reducer
        before = reducer.closing
        reducer.closing = False
        try:
            yield
        finally:
            reducer.closing = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train on unequal numbers of inputs: a rank that has finished takes part with zeros until
        all ranks have finished.

        At the end every rank has the model of a rank that finished last. A Stepper does not need
        this.

        Args:
            divide_by_initial_world_size: True: divide by the number of all ranks. False: divide by
                the number of ranks that still have inputs.
            enable: False: do nothing.
            throw_on_early_termination: stop all ranks with a RuntimeError when the first rank has
                no more inputs.

        Returns:
            torch's `Join` of this wrapper.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: object) -> Uneven:
        """Return the hook that torch's `Join` calls while other ranks still have inputs.

        Args:
            divide_by_initial_world_size: as for `join`.
            _: other keywords of torch's `Join`; ignored.
        """
        averaging = self._tied("join()")
        if averaging.uneven is not None:
            averaging.uneven.end()
        averaging.uneven = Uneven(
            averaging,
            lambda: bool(self._join_config.enable),
            divide_by_all=divide_by_initial_world_size,
        )
        return averaging.uneven

    @property
    def join_device(self) -> torch.device:
        """The device on which torch's `Join` counts the ranks."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that torch's `Join` counts."""
        return self.process_group

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]
    ) -> None:
        """Average the gradients with a communication hook, as torch's wrapper does.

        Args:
            state: passed to the hook as its first argument.
            hook: `hook(state, bucket)` returns a future of the bucket's mean over the ranks.
        """
        if self._averaging is None:
            raise UsageError("hook-with-stepper")
        reducer = self._averaging.reducer
        if isinstance(reducer.reduction, TorchHook):
            raise UsageError("second-hook")
        check_hook(hook)
        reducer.reduction = TorchHook(state, hook)
        reducer.scale = 1.0  # the hook divides itself

    def sync_buffers(self) -> None:
        """Average BatchNorm's statistics over the ranks, and copy other buffers from rank 0. All
        ranks call it. With `forward_sync_buffers` no forward needs it.
        """
        average_buffers(self.module, self.group)

    def give_up_reducer(self) -> Reducer:
        """Return the reducer to a Stepper. After this, backward no longer averages itself."""
        reducer = self._tied("a second Stepper").reducer
        if isinstance(reducer.reduction, TorchHook):
            raise UsageError("hook-with-stepper")
        self._averaging = None
        reducer.on_first = None
        reducer.closing = False
        reducer.scale = 1.0
        reducer.dense()
        return reducer
