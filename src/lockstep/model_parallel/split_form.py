"""Checkpoints of a split model, with the names and whole tensors of the unsplit model: a run can
resume on any other mesh. Also the groups of a mesh's axes, and the SHA-256 of the weights.

The ranks of a stage gather one tensor after the other, and each writes an equal share of its
elements. Every rank reads whole tensors, one after the other, and takes its part of each. The
SHA-256 is the one that a single process would compute (checks/identity.py).

torch gets the mesh as a DeviceMesh; Lockstep has a Group for each line of ranks. The two use
different process groups. torch sends on its own (DTensor and FSDP, from autograd's threads); on a
shared process group, its collectives and Lockstep's could run in a different order on each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.form import CheckpointForm, compare_forms, forms_of
from lockstep.checks.identity import weights
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.config.mesh import AXES, Axis, Mesh
from lockstep.errors import UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.split import ModelNames, TiedStages
from lockstep.step.stepper import Stepper
from lockstep.world.rendezvous import loopback
from lockstep.world.world import World


@dataclass(frozen=True, slots=True)
class Axes:
    """The Groups along this rank's lines of the mesh. Lines with the same ranks share one Group; a
    line of all ranks uses the world's.
    """

    data: Group
    """Ranks that hold the same part of the model. Gradients are summed over them."""
    shard: Group
    pipeline: Group
    tensor: Group
    model: Group
    """All ranks that together hold one replica: shard x pipeline x tensor."""

    @property
    def groups(self) -> set[Group]:
        return {self.data, self.shard, self.pipeline, self.tensor, self.model}


def open_devices(mesh: Mesh, world: World) -> tuple[DeviceMesh, Axes]:
    """Create the DeviceMesh and the Axes of a world. The world closes both. Every rank calls it and
    creates the same number of groups, so that torch gives them the same names on all ranks.

    Raises UsageError if mesh and world have different sizes.
    """
    mesh.check_size(world.size)
    with loopback(world.local_size == world.size):
        devices = device_mesh(mesh, world.device.type, world.timeout)
    groups = {}

    def along(*axes: Axis) -> Group:
        long_axes = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        if long_axes not in groups:
            ranks = mesh.line(world.rank, *long_axes)
            groups[long_axes] = world.group if len(ranks) == world.size else world.subgroup(ranks)
        return groups[long_axes]

    axes = Axes(
        along("data"),
        along("shard"),
        along("pipeline"),
        along("tensor"),
        along("shard", "pipeline", "tensor"),
    )
    return devices, axes


def device_mesh(mesh: Mesh, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Return the mesh as torch's DeviceMesh, with named axes. Every rank of torch's default process
    group calls it.

    No axis uses the default process group itself, which belongs to the world. `timeout` is for
    torch's collectives along the axes.
    """
    backend = dist.get_backend()
    devices = init_device_mesh(
        device_type, mesh.shape, mesh_dim_names=AXES, backend_override=dict.fromkeys(AXES, backend)
    )
    if timeout is not None:
        for group in devices.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return devices


class SplitForm(CheckpointForm):
    """The checkpoint form of a Stepper that trains a part of a model."""

    def __init__(
        self, stepper: Stepper, names: ModelNames, local: Locals, tied: TiedStages, *, writes: bool
    ) -> None:
        """`writes`: whether this rank's replica is the replica that is saved."""
        super().__init__(stepper)
        self._names = names
        self._local = local
        self._tied = tied
        self._writes = writes

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        module = self._local.module
        tensors = module.state_dict(keep_vars=True)
        names = {self._names.stored(name): name for name in tensors}
        model = []
        for stored, name in names.items():
            model += self._pieces(stored, name, tensors[name])
        local_names = {name_of(parameter): name for name, parameter in module.named_parameters()}
        everywhere, own = self._stepper.update.optimizer.pieces(name_of)
        optimizer = []
        for piece in everywhere:
            _, _, name = piece.name.partition("/")
            optimizer += self._pieces(piece.name, local_names.get(name, name), piece.data)
        for piece in own:
            # sharded update: no other rank along the data axis holds the piece
            _, _, name = piece.name.partition("/")
            if self._tied.is_first(name):
                optimizer.append(piece)
        return model, optimizer

    def _pieces(self, label: str, name: str, tensor: Tensor) -> list[TensorPiece]:
        """Return what this rank writes of a tensor. All ranks of a stage call it."""
        if not self._writes or not self._tied.is_first(name):
            return []
        return self._local.pieces(label, name, tensor)

    def groups(self, local: Sequence[Sequence[str]]) -> list[list[str]]:
        names_by_group = [list(names) for names in local]
        control = self._stepper.world.control
        by_rank = everybodys(names_by_group, control, "for the optimizer's groups")
        counts = [len(groups) for groups in by_rank]
        if len(set(counts)) > 1:
            raise UsageError("parameter-groups-differ", counts=counts)
        order = {name: number for number, name in enumerate(self._names.parameters)}
        joined: list[set[str]] = [set() for _ in local]
        for groups in by_rank:
            for group, names in zip(joined, groups, strict=True):
                group.update(names)

        def position(name: str) -> tuple[int, str]:
            return order.get(name, len(order)), name

        return [sorted(group, key=position) for group in joined]

    def numbers(self, local: dict[str, Any]) -> dict[str, Any]:
        by_rank = everybodys(local, self._stepper.world.control, "for the optimizer's numbers")
        joined: dict[str, Any] = {}
        for numbers in by_rank:
            joined |= numbers
        return joined

    def compare(self, checkpoint: Checkpoint) -> None:
        compare_forms(self._names.forms, forms_of(checkpoint.model().items()))

    def load(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.model()
        names = self._local.module.state_dict()
        self._local.load((name, stored[self._names.stored(name)].read()) for name in names)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        names = {self._names.first(name): name for name, _ in self._local.module.named_parameters()}
        state = {}
        for key, tensor in checkpoint.optimizer().items():
            _, _, name = key.partition("/")
            if name in names:
                state[key] = self._local.part(names[name], tensor.read())
        return state


def sha256(local: Locals, pipeline: Group, names: ModelNames) -> str:
    """Return the SHA-256 of the weights, as 64 hexadecimal digits. All ranks of a replica call it.

    The tensors are gathered in a stage, and sent to the other stages, one after the other. `names`
    are those of the whole model: a tensor with several names counts under only one.
    """
    parts = weights(local.module)
    by_rank = everybodys(list(parts), pipeline.host, "for the weights' SHA-256")
    digest = hashlib.sha256()
    for name, (shape, dtype) in sorted(names.forms.items()):
        owner = next(rank for rank, rank_names in enumerate(by_rank) if name in rank_names)
        tensor = torch.empty(shape, dtype=dtype)
        if owner == pipeline.rank:
            tensor = local.gather(name, parts[name]).cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8)
        if len(data):
            pipeline.host.broadcast(data, owner, "for the weights' SHA-256").wait()
        digest.update(data.numpy().data)
    return digest.hexdigest()
