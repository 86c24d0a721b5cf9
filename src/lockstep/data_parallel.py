"""torch's contract, and nothing more: wrap a module, call backward, and `.grad` is the mean over all ranks.

    model = lockstep.DistributedDataParallel(net)
    loss.backward()                  # gradients leave bucket by bucket while it runs; when it returns they are averaged
    optimizer.step()

It divides by the world size, as torch's does: right where every rank holds as many samples, a mean of means where not. The Stepper
divides by the true weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep import status
from lockstep.checks.replicas import ReplicaCheck
from lockstep.checks.start import compare_start, model_fields
from lockstep.checks.unused import UnusedCheck
from lockstep.collectives.group import Group
from lockstep.errors import UsageError
from lockstep.gradients.buffers import average_buffers
from lockstep.gradients.compiled import cut_by_buckets
from lockstep.gradients.reducer import Reducer
from lockstep.gradients.reductions import reduction as choose_reduction
from lockstep.gradients.replicate import replicate
from lockstep.gradients.torch_hook import TorchHook
from lockstep.uneven import Uneven
from lockstep.world import World

Checks = Literal["full", "start", "off"]
_STEPPER_ONLY = ("exact", "update", "sync_every", "staleness", "outer", "compress", "clip", "scaler", "scheduler")
_TIED = ("_world", "group", "_reducer", "_unused", "_replicas", "_uneven")
_WITHOUT_MEANING = {
    "delay_all_reduce_named_params": "gradients leave when their bucket is full",
    "param_to_hook_all_reduce": "gradients leave when their bucket is full",
    "mixed_precision": "use torch.autocast, or parameters in bfloat16",
}


class DistributedDataParallel(nn.Module):
    """Averages the gradients of `module` over all ranks at the end of each backward.

    The keywords are torch's where they mean the same:
    `device_ids`, `output_device`  the module's one GPU (leave them out: the module says where it is); refused for a module on a CPU.
    `broadcast_buffers`            accepted; BatchNorm statistics stay local during training, `sync_buffers()` averages them.
    `init_sync`                    False leaves out the comparison of the ranks and the broadcast from rank 0.
    `process_group`, `device_mesh` the ranks to average over: a group, or a mesh of one axis.
    `bucket_cap_mb`                MiB of a bucket (25).
    `find_unused_parameters`, `static_graph`  a parameter that gets no gradient on any rank is meant so: its `.grad` stays None. Without
                                   them it is an error at the end of its backward, by name.
    `gradient_as_bucket_view`      always so; gradient memory is one times the parameters.
    Ours: `checks` ("full" compares the replicas at the forwards after steps 1, 2 and every 100th, "start" only the set-up, "off" nothing) and
    `reduce` (auto, native, central, ring, tree, halving_doubling, shared_memory, hierarchical).

    The hooks are on the parameters, so a forward through `.module` is reduced as well, any output will do, and several forwards may
    precede one backward. Parameters may be frozen, unfrozen and added between steps. What needs to know of a whole step (clipping, weights,
    sharded updates) needs a Stepper. Raises UsageError for what cannot be meant, ReplicaDivergence and UnusedParameters on all ranks alike.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        device_mesh: DeviceMesh | None = None,
        *,
        checks: Checks = "full",
        reduce: str = "auto",
        world: World | None = None,
        **more: object,
    ) -> None:
        super().__init__()
        _refuse(more, dim, bucket_cap_mb)
        if isinstance(module, nn.parallel.DistributedDataParallel | DistributedDataParallel):
            raise UsageError("the module is wrapped already: give its .module")
        check_checks(checks)
        self.device = _device(module, device_ids, output_device)
        self.module = module
        self.is_copy = False
        self._world = world or World.current()
        self.group = _group(self._world, process_group, device_mesh)
        self.ignored = ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # where torch keeps them
        if init_sync:
            if checks != "off":
                compare_start(self.group, model_fields(module, ignored))
            replicate(module, self.group, ignored)
        self._bucket_bytes = int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        reducer = Reducer(module, self.group, choose_reduction(reduce, self.group), bucket_bytes=self._bucket_bytes, ignored=ignored)
        reducer.closing = True
        reducer.scale = 1 / self.group.size
        reducer.end_of_backward = self._finish
        self._reducer: Reducer | None = reducer
        self._unused = UnusedCheck(reducer, "skip" if find_unused_parameters or static_graph else "error")
        self._replicas = ReplicaCheck() if checks == "full" else None
        self._forwards = 0  # that were compared, or might have been
        self._unchecked = 0  # backwards since the last forward
        self._uneven: Uneven | None = None  # inside `join`

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files (an average of the weights, torch.save): the module, without what ties this wrapper to its ranks."""
        return {**self.__dict__, **dict.fromkeys(_TIED, None), "is_copy": True}

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # compiling the wrapper compiles the module
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_copy:
            self._check_copy()
            return self.module(*args, **kwargs)
        args, kwargs = self._ready(args, kwargs)
        with cut_by_buckets(self._bucket_bytes, wanted=self.group.size > 1):
            return self.module(*args, **kwargs)

    def _check_copy(self) -> None:
        if self.training and torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            raise UsageError("this wrapper is a copy, which reduces nothing: wrap its .module again to train it, or call eval()")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs on the module's device, and the reducer ready where this forward's backward will be reduced."""
        status.enter("forward")
        moved = self._inputs(args, kwargs)
        if self._reducer is not None and self._reducer.closing and self.training and torch.is_grad_enabled():
            self._before_forward(self._uneven.step() if self._uneven is not None else self.group.size)
        return moved

    def _before_forward(self, active: int) -> None:
        """What all ranks do together before a forward that will be reduced; `active` of them still have inputs."""
        assert self._reducer is not None
        if self._unchecked and self._replicas is not None and active == self.group.size:
            self._forwards += 1
            if self._replicas.due(self._forwards):
                self._replicas.compare(self.group, self._trained(), self._forwards, f"after step {self._forwards}")
        self._unchecked = 0
        self._reducer.renew()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        assert self._reducer is not None
        return [(name, parameter) for name, parameter in self.module.named_parameters() if name not in self._reducer.ignored]

    def _finish(self) -> None:
        assert self._reducer is not None
        self._reducer.finish()
        self._unchecked += 1
        self._unused()

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs on the module's device: CPU tensors are moved to its GPU, tensors on another device are refused by name."""
        names = [*(f"argument {number}" for number in range(len(args))), *kwargs]
        values = [self._moved(value, name) for name, value in zip(names, [*args, *kwargs.values()], strict=True)]
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _moved(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == self.device:
                return value
            if value.device.type == "cpu":
                return value.to(self.device, non_blocking=True)
            raise UsageError(
                f"{name} is on {value.device}, the module on {self.device} (rank {self._world.rank}, local rank {self._world.local_rank}): "
                "move it to world.device; cuda:{rank} is right on the first host only, use local_rank"
            )
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._moved(part, f"{name}[{number}]") for number, part in enumerate(value))
        if type(value) is dict:
            return {key: self._moved(part, f"{name}[{key!r}]") for key, part in value.items()}
        return value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only add to `.grad`; the first one after it sends the sum of all.

        The old state comes back at the end, also after an exception. Only the backward needs to be inside.
        """
        if self._reducer is None:
            raise UsageError("no_sync() has no meaning inside a Stepper: its windows decide when gradients leave")
        with self._reducer.window(last=False):
            yield

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Train on unequal numbers of inputs: a rank that has run out takes part with zeros until all have.

        The mean is over all ranks, or, with `divide_by_initial_world_size=False`, over those that still have inputs. At the end every rank
        has the model of one that came last. With `throw_on_early_termination=True` all ranks stop with a UsageError when the first runs out.
        A Stepper needs none of this: there a rank without micro-batches takes part by itself.
        """
        if self._reducer is None:
            raise UsageError("join() has no meaning inside a Stepper: a rank without micro-batches takes part by itself")
        if not enable:
            yield
            return
        uneven = self._uneven = Uneven(self.group, self._reducer, divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
            uneven.shadow(self._before_forward, self._finish)
            uneven.settle(self.module)
        finally:
            self._uneven = None
            uneven.end()

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]) -> None:
        """Reduce by a communication hook, as torch's wrapper does: `hook(state, bucket)` returns a future of the mean over the ranks."""
        if self._reducer is None:
            raise UsageError(
                "this wrapper belongs to a Stepper, which divides by the true weight; a communication hook divides by the ranks"
            )
        if isinstance(self._reducer.reduction, TorchHook):
            raise UsageError("a communication hook is registered already; a wrapper has one")
        self._reducer.reduction = TorchHook(state, hook)
        self._reducer.scale = 1.0  # hooks divide

    def sync_buffers(self) -> None:
        """Average BatchNorm's statistics over the ranks (other buffers come from rank 0). All ranks call it, before evaluating or saving."""
        average_buffers(self.module, self.group)

    def give_up_reducer(self) -> Reducer:
        """Hand the reducer to a Stepper: backward no longer averages by itself."""
        if self._reducer is None:
            raise UsageError("this DistributedDataParallel already belongs to a Stepper")
        if isinstance(self._reducer.reduction, TorchHook):
            raise UsageError("a communication hook divides by the number of ranks and a Stepper by the true weight: use one of them")
        reducer, self._reducer = self._reducer, None
        reducer.end_of_backward = None
        reducer.closing = False
        reducer.scale = 1.0
        return reducer


def check_checks(checks: str) -> None:
    if checks not in ("full", "start", "off"):
        raise UsageError(f"checks={checks!r}: choose 'full', 'start' or 'off'")


def _refuse(more: dict[str, object], dim: int, bucket_cap_mb: float | None) -> None:
    """Refuse what torch's wrapper takes and this one cannot mean, each with what to do instead."""
    for name, value in more.items():
        if name in _STEPPER_ONLY:
            raise UsageError(f"{name}={value!r} needs a Stepper: it concerns whole steps, and the wrapper sees only gradients")
        if name not in _WITHOUT_MEANING:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword {name!r}")
        if value is not None:
            raise UsageError(f"{name} has no meaning here: {_WITHOUT_MEANING[name]}")
    if dim != 0:
        raise UsageError(f"dim={dim}: batches are split by the loader, along dimension 0")
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise UsageError(f"bucket_cap_mb={bucket_cap_mb}: a bucket holds more than 0 MiB")


def _device(module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise UsageError(f"the module's parameters are on {', '.join(sorted(map(str, devices)))}: a replica lives on one device")
    (device,) = devices
    for name, given in (("device_ids", device_ids), ("output_device", output_device)):
        ids = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
        if ids and device.type == "cpu":
            raise UsageError(f"{name}={given} is for a module on a GPU, and this one is on the CPU: leave it out")
        if len(ids) > 1 or any(torch.device("cuda", each) != device if isinstance(each, int) else each != device for each in ids):
            raise UsageError(f"{name}={given}, but the module is on {device}: one process has one device; leave it out")
    return device


def _group(world: World, process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> Group:
    if device_mesh is not None:
        if process_group is not None:
            raise UsageError("process_group= and device_mesh= both say which ranks to average over: give one")
        if device_mesh.ndim != 1:
            raise UsageError(f"device_mesh has axes {device_mesh.mesh_dim_names}: give the data-parallel one, such as mesh['data']")
        process_group = device_mesh.get_group()
    return world.group if process_group is None else world.group_of(process_group)
