"""The arguments of lockstep.DistributedDataParallel: keywords of torch's that it does not support,
devices of the module and its inputs, and the ranks to average over.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.collectives.group import Group
from lockstep.config import knob
from lockstep.errors import UsageError
from lockstep.gradients.layout import BUCKET, FIRST_BUCKET
from lockstep.world.world import World

_STEPPER_ONLY = (
    "exact",
    "update",
    "sync_every",
    "staleness",
    "outer",
    "compress",
    "clip",
    "scaler",
    "scheduler",
)
_WITHOUT_MEANING = {
    "delay_all_reduce_named_params": "gradients leave when their bucket is full",
    "param_to_hook_all_reduce": "gradients leave when their bucket is full",
    "mixed_precision": "use torch.autocast, or parameters in bfloat16",
}
_MIB = 2**20
Checks = Literal["full", "start", "off"]


def refuse(more: dict[str, object], dim: int) -> None:
    """Raise an error for keywords of torch's wrapper that are not supported, with a replacement."""
    for name, value in more.items():
        if name in _STEPPER_ONLY:
            raise UsageError("needs-a-stepper", name=name, value=value)
        if name not in _WITHOUT_MEANING:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword {name!r}")
        if value is not None:
            raise UsageError(
                "keyword-without-meaning", name=name, value=value, instead=_WITHOUT_MEANING[name]
            )
    if dim != 0:
        raise UsageError(
            "keyword-without-meaning",
            name="dim",
            value=dim,
            instead="have the loader split batches along dimension 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPolicy:
    """When rank 0's buffers are broadcast to all ranks."""

    at_start: bool
    """Whether all ranks begin with rank 0's buffers."""
    forward: bool
    """Whether every forward begins with rank 0's buffers."""


def buffer_policy(
    broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> BufferPolicy:
    """Combine torch's two keywords. The old one, `broadcast_buffers`, is deprecated in torch, and
    also decides about the start.
    """
    if broadcast_buffers is not None:
        if forward_sync_buffers is not None:
            effect = "its value is ignored, because forward_sync_buffers is given too"
        else:
            effect = (
                "forward_sync_buffers takes its place; with broadcast_buffers=False buffers are not"
                " made equal at the start either"
            )
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is deprecated in torch's wrapper: {effect}",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return BufferPolicy(at_start=True, forward=forward_sync_buffers)
    broadcast = broadcast_buffers is None or broadcast_buffers
    return BufferPolicy(at_start=broadcast, forward=broadcast)


def bucket_caps(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[int, ...]:
    """Return the maximum bytes of bucket 0, 1 and so on; the last value applies to all others."""
    if bucket_cap_mb is not None:
        knob.number("bucket_cap_mb", bucket_cap_mb, above=0)
    for number, cap in enumerate(bucket_cap_mb_list or ()):
        knob.number(f"bucket_cap_mb_list[{number}]", cap, above=0)
    if bucket_cap_mb_list:
        return tuple(int(cap * _MIB) for cap in bucket_cap_mb_list)
    largest = BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * _MIB)
    return min(FIRST_BUCKET, largest), largest


def device_of(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device:
    """Return the device of the module. Raises UsageError if the module is on several devices, or
    not on the device in the arguments.
    """
    devices = {parameter.device for parameter in module.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise UsageError("model-on-several-devices", devices=sorted(map(str, devices)))
    (device,) = devices
    for name, option in (("device_ids", device_ids), ("output_device", output_device)):
        if option is None:
            continue
        named = []
        for index in option if isinstance(option, (list, tuple)) else [option]:
            named.append(torch.device("cuda", index) if isinstance(index, int) else index)
        if named and (device.type == "cpu" or named != [device]):
            raise UsageError("not-the-modules-device", name=name, value=option, device=str(device))
    return device


def group_of(
    world: World, process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None
) -> Group:
    """Return the ranks to average over. Raises UsageError if both arguments are given, or for a
    mesh of several axes.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise UsageError("two-process-groups")
        if device_mesh.ndim != 1:
            raise UsageError("mesh-of-several-axes", axes=list(device_mesh.mesh_dim_names or ()))
        process_group = device_mesh.get_group()
    return world.group if process_group is None else world.group_of(process_group)


def check_checks(checks: str) -> None:
    knob.chosen("checks", checks, get_args(Checks))


def check_use(module: nn.Module | None) -> None:
    """Raise a UsageError for uses in which gradients would not be averaged: distributed autograd,
    or an optimizer in the backward of `module` (if given).
    """
    if (
        dist.rpc.is_available()
        and dist.rpc.api._is_current_rpc_agent_set()
        and _in_distributed_autograd()
    ):
        raise UsageError("distributed-autograd")
    if module is not None and any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters()
    ):
        raise UsageError("optimizer-in-backward")


def _in_distributed_autograd() -> bool:
    try:
        dist.autograd._current_context()
    except RuntimeError:
        return False
    return True


def inputs_on(
    device: torch.device, world: World | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs on the module's device. CPU tensors are moved there. For a tensor on
    another device it raises a UsageError, which names the argument.
    """

    def moved(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            if value.device.type == "cpu":
                return value.to(device, non_blocking=True)
            ranks = "" if world is None else f" (rank {world.rank}, local rank {world.local_rank})"
            raise UsageError(
                "input-on-another-device",
                argument=name,
                device=str(value.device),
                module=f"{device}{ranks}",
            )
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(
                moved(part, f"{name}[{number}]") for number, part in enumerate(value)
            )
        if type(value) is dict:
            return {key: moved(part, f"{name}[{key!r}]") for key, part in value.items()}
        return value

    placed = [moved(value, f"argument {number}") for number, value in enumerate(args)]
    return tuple(placed), {name: moved(value, name) for name, value in kwargs.items()}
