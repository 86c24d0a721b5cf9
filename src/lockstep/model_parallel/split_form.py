"""Checkpoints of a split model, with the names and whole tensors of the unsplit model: a run can
resume on any other mesh. Also the groups of a mesh's axes, and the SHA-256 of the weights.

Each element is written by the first rank that holds it. Every rank reads whole tensors, one after
the other, and takes its part of each. The SHA-256 is the one that a single process would compute
(checkpoints/identity.py).

torch gets the mesh as a DeviceMesh; Lockstep has a Group for each line of ranks. The two use
different process groups. torch sends on its own (DTensor and FSDP, from autograd's threads); on a
shared process group, its collectives and Lockstep's could run in a different order on each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.identity import weights
from lockstep.checkpoints.pieces import TensorPiece
from lockstep.collectives.broadcast_json import everybodys, said_by
from lockstep.collectives.group import Group
from lockstep.config.mesh import AXES, Axis, Mesh
from lockstep.errors import UsageError
from lockstep.model_parallel.local import Locals
from lockstep.model_parallel.split import ModelNames, TiedStages
from lockstep.step.model_shard import compare_forms, forms_of
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


def open_devices(mesh: Mesh, world: World) -> tuple[DeviceMesh, Axes]:
    """Create the DeviceMesh and the Axes of a world. Every rank calls it. The world closes both.
    Raises UsageError if mesh and world have different sizes.
    """
    mesh.check_size(world.size)
    with loopback(world.local_size == world.size):
        devices = device_mesh(mesh, world.device.type, world.timeout)
    return devices, axes_of(mesh, world)


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


def axes_of(mesh: Mesh, world: World) -> Axes:
    """Create this rank's Groups. Every rank calls it and creates the same number of groups, so that
    torch gives them the same names on all ranks.
    """
    made: dict[tuple[Axis, ...], Group] = {}

    def along(*axes: Axis) -> Group:
        long = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        if long not in made:
            line = mesh.line(world.rank, *long)
            made[long] = world.group if len(line) == world.size else world.subgroup(line)
        return made[long]

    return Axes(
        along("data"),
        along("shard"),
        along("pipeline"),
        along("tensor"),
        along("shard", "pipeline", "tensor"),
    )


class SplitForm:
    """The CheckpointForm (step/model_shard.py) of a Stepper that trains a part of a model."""

    def __init__(
        self,
        stepper: Stepper,
        names: ModelNames,
        here: Locals,
        tied: TiedStages,
        tensor: Group,
        *,
        writes: bool,
    ) -> None:
        """`tensor`: the ranks along the tensor axis; `writes`: whether this rank's replica is the
        replica that is saved.
        """
        self._stepper = stepper
        self._names = names
        self._here = here
        self._tied = tied
        self._tensor = tensor
        self._writes = writes

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[list[TensorPiece], list[TensorPiece]]:
        return self._of_model(), self._of_optimizer(name_of)

    def _of_model(self) -> list[TensorPiece]:
        found: dict[str, list[TensorPiece]] = {}
        for name, tensor in self._here.module.state_dict(keep_vars=True).items():
            known = self._names.in_checkpoints(name)
            if known not in found:
                found[known] = [
                    replace(each, name=known) for each in self._pieces("", name, tensor.detach())
                ]
        return [each for pieces in found.values() for each in pieces]

    def _of_optimizer(self, name_of: Callable[[Tensor], str]) -> list[TensorPiece]:
        local = {
            name_of(parameter): name for name, parameter in self._here.module.named_parameters()
        }
        everywhere, mine = self._stepper.update.optimizer.pieces(name_of)
        found = []
        for piece in everywhere:
            state, _, name = piece.name.partition("/")
            found += [
                replace(each, name=piece.name)
                for each in self._pieces(f"{state}/", local.get(name, name), piece.data)
            ]
        # sharded update: pieces that no other rank along the data axis holds
        for piece in mine:
            if self._tied.is_first(piece.name.partition("/")[2]):
                found.append(piece)
        return found

    def _pieces(self, prefix: str, name: str, tensor: Tensor) -> list[TensorPiece]:
        """Return what this rank writes of a tensor. All ranks along the tensor axis call it."""
        pieces = self._here.pieces(prefix, name, tensor, self._tensor)
        return pieces if self._writes and self._tied.is_first(name) else []

    def groups(self, mine: Sequence[Sequence[str]]) -> list[list[str]]:
        said = everybodys(
            [list(names) for names in mine],
            self._stepper.world.control,
            "for the optimizer's groups",
        )
        counts = [len(groups) for groups in said]
        if len(set(counts)) > 1:
            raise UsageError("parameter-groups-differ", counts=counts)
        order = {name: number for number, name in enumerate(self._names.parameters)}
        joined = [
            {name for groups in said for name in groups[number]} for number in range(len(mine))
        ]
        return [
            sorted(names, key=lambda name: (order.get(name, len(order)), name)) for names in joined
        ]

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        said = everybodys(mine, self._stepper.world.control, "for the optimizer's numbers")
        return {name: value for each in said for name, value in each.items()}

    def compare(self, checkpoint: Checkpoint) -> None:
        compare_forms(self._names.forms, forms_of(checkpoint.model().items()))

    def load(self, checkpoint: Checkpoint) -> None:
        here: dict[str, str] = {}
        for name in self._here.module.state_dict(keep_vars=True):
            here.setdefault(self._names.in_checkpoints(name), name)
        there = checkpoint.model()
        self._here.load((here[name], there[name].read()) for name in there if name in here)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        here = {self._names.first(name): name for name, _ in self._here.module.named_parameters()}
        found = {}
        for key, each in checkpoint.optimizer().items():
            name = key.partition("/")[2]
            if name in here:
                found[key] = self._here.take(here[name], each.read())
        return found


def sha256(here: Locals, axes: Axes, names: Collection[str]) -> str:
    """Return the SHA-256 of the weights, as 64 hexadecimal digits, on every rank. All ranks of a
    replica (`axes.model`) call it.

    The replica's first rank receives the tensors one after the other, by sorted name. No rank holds
    more than one whole tensor at a time. `names` are those of the whole model (`weights(model)`
    before it was cut): a tensor with several names in several stages counts under only one.
    """
    mine = weights(here.module)
    digest = hashlib.sha256()
    for name in sorted(names):
        pieces = here.pieces("", name, mine[name], axes.tensor) if name in mine else []
        for octets in _arriving(axes.model.host, pieces):
            digest.update(octets.numpy().data)
    found: str = said_by(0, digest.hexdigest(), axes.model.host, "for the weights' SHA-256")
    return found


def _arriving(group: Group, pieces: list[TensorPiece]) -> list[Tensor]:
    """Gather one tensor's bytes, in order, on the group's first rank. Other ranks return an empty
    list.
    """
    assert len(pieces) <= 1, "a rank holds one interval of a tensor"
    octets = [
        each.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in pieces
    ]
    told = torch.tensor([pieces[0].start, len(octets[0])] if pieces else [-1, 0])
    table = group.all_gather(told, place="for the weights' SHA-256").view(-1, 2).tolist()
    parts: dict[int, Tensor] = {}
    for rank, (start, size) in sorted(enumerate(table), key=lambda row: row[1]):
        if start == -1 or start in parts:  # no piece, or one that another stage also has
            continue
        parts[start] = octets[0] if rank == group.rank else torch.empty(size, dtype=torch.uint8)
        if size and rank != 0 and group.rank == 0:
            group.receive(parts[start], rank)
        elif size and rank == group.rank != 0:
            group.send(parts[start], 0)
    return list(parts.values()) if group.rank == 0 else []
