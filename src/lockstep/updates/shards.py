"""Parameters cut into shards: every rank updates its slices of them, then all exchange the updated
slices.

    layout      the parameters one after another in flat tensors (gradients/layout.py), which
                become their memory
    slice       a rank's part of a flat tensor (collectives/schedule.py)
    piece       the part of one parameter in a slice: a view, which the user's optimizer treats as
                a parameter

An elementwise optimizer does to a piece exactly what it would do to the whole. shard_memory.py
defines where the flat tensors lie, and how slices reach the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoints.pieces import TensorPiece
from lockstep.checkpoints.plain import decoded, encoded
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.collectives.schedule import BLOCK, slice_of
from lockstep.collectives.work import Work
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket, view_of
from lockstep.gradients.layout import Layout
from lockstep.updates.shard_memory import shard_memory

State = dict[str, Any]
"""The optimizer's state of one parameter."""
ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
SCALARS = ("step", "eta", "mu", "mu_product")  # states that are one number per whole parameter


def elementwise(kind: type[Optimizer]) -> bool:
    """Whether an optimizer is known to treat every element by itself."""
    return kind in [getattr(torch.optim, name) for name in ELEMENTWISE]


def check_elementwise(kind: type[Optimizer]) -> None:
    """Raise UsageError for an optimizer that does not treat every element by itself."""
    if not elementwise(kind):
        raise UsageError(
            "optimizer-not-elementwise",
            optimizer=f"{kind.__module__}.{kind.__qualname__}",
            known=list(ELEMENTWISE),
        )


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements [start, stop) of a parameter, in the order of memory, that belong to one rank."""

    parameter: int
    rank: int
    start: int
    stop: int


def pieces_of(layout: Layout, size: int) -> list[OwnedRange]:
    """All ranks' pieces, in the order of the layout. They tile every parameter."""
    found = []
    for bucket in layout.buckets:
        for rank in range(size):
            mine = slice_of(bucket.numel, rank, size)
            for span in bucket.spans:
                start, stop = max(mine.start, span.start), min(mine.stop, span.stop)
                if start < stop:
                    found.append(
                        OwnedRange(span.parameter, rank, start - span.start, stop - span.start)
                    )
    return found


class Shards:
    """Some parameters, in flat memory, cut into a shard for each rank of a group. Every rank makes
    it and calls its methods alike.

    The parameters keep their values and their identity, but get other memory. `together`: this
    memory is one copy for all ranks (shard_memory.can_share).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        group: Group,
        owners: int | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.parameters, self._layout, self._group = parameters, layout, group
        self.owners, self._together = owners or group.size, together
        self.all_pieces = pieces_of(layout, self.owners)
        self.pieces = [piece for piece in self.all_pieces if piece.rank == group.rank]
        self.someone_has_none = len({piece.rank for piece in self.all_pieces}) < self.owners
        self.views = [nn.Parameter(place) for place in self._lay()]
        self._mine: dict[int, list[nn.Parameter]] = {}
        for piece, view in zip(self.pieces, self.views, strict=True):
            self._mine.setdefault(id(parameters[piece.parameter]), []).append(view)

    def _lay(self) -> list[Tensor]:
        """Put the parameters into flat memory. Return this rank's pieces, as it sees them."""
        parameters = self.parameters
        self._memory = memory = shard_memory(
            self._layout, self._group, self.of, together=self._together
        )
        spans = {
            span.parameter: (span, flat, updated)
            for plan, flat, updated in zip(
                self._layout.buckets, memory.flats, memory.updated, strict=True
            )
            for span in plan.spans
        }
        self._homes: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._updated: list[Tensor] = []
        for number, parameter in enumerate(parameters):
            span, flat, _ = spans[number]
            self._homes.append(view_of(flat, span, parameter))
        for piece in self.pieces:
            span, flat, updated = spans[piece.parameter]
            where = slice(span.start + piece.start, span.start + piece.stop)
            self._seen.append(flat[where])
            self._updated.append(updated[where])
        values = [flat_like(each, home) for each, home in zip(parameters, self._homes, strict=True)]
        memory.fill(
            list(zip(map(flat_view, self._homes), values, strict=True)),
            [
                (place, values[piece.parameter][piece.start : piece.stop])
                for piece, place in zip(self.pieces, self._updated, strict=True)
            ],
        )
        for parameter, home in zip(parameters, self._homes, strict=True):
            parameter.data = home
        self._addresses = [each.data_ptr() for each in parameters]
        return self._seen

    def of(self, rank: int) -> list[range]:
        """A rank's elements of each bucket."""
        if rank >= self.owners:
            return [range(0) for _ in self._layout.buckets]
        return [slice_of(plan.numel, rank, self.owners) for plan in self._layout.buckets]

    def mine_of(self, parameter: Tensor) -> list[nn.Parameter]:
        """This rank's pieces of a parameter."""
        return self._mine.get(id(parameter), [])

    def slices(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This rank's slices of flat tensors with this layout."""
        mine = self.of(self._group.rank)
        return [flat[part.start : part.stop] for flat, part in zip(flats, mine, strict=True)]

    def take_gradients(self) -> None:
        """Before the pieces are updated: give them their part of the parameters' `.grad` (or None),
        and the memory in which they are updated.
        """
        self._take_back()
        self._memory.open()
        for piece, view, place in zip(self.pieces, self.views, self._updated, strict=True):
            gradient = self.parameters[piece.parameter].grad
            view.data = place
            view.grad = (
                None
                if gradient is None
                else flat_like(gradient, self.parameters[piece.parameter])[piece.start : piece.stop]
            )

    def _take_back(self) -> None:
        """Copy parameters that were given other memory (`parameter.data = ...`) back into ours."""
        for parameter, home, address in zip(
            self.parameters, self._homes, self._addresses, strict=True
        ):
            if parameter.data_ptr() != address:
                parameter.data = home.copy_(parameter.data)

    def differing(self) -> Sequence[Tensor]:
        """The tensors that must be equal on all ranks, because the next update overwrites them."""
        self._take_back()
        return self._memory.differing()

    def gradients(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's pieces, with their parameters' names."""
        for piece, view in zip(self.pieces, self.views, strict=True):
            if view.grad is not None:
                yield names[piece.parameter], view.grad

    def gather(self) -> None:
        """After the pieces are updated: make every rank see all ranks' pieces."""
        self._memory.gather()
        for view, place in zip(self.views, self._seen, strict=True):
            view.data = place
        # so that autograd detects a backward through an old graph
        torch.autograd.graph.increment_version(self.parameters)

    def everybodys(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the values of all blocks, in order. `sums[i]` are those of this rank's slice of
        flat tensor i.
        """
        wholes = [
            part.new_zeros(-(-plan.numel // BLOCK))
            for part, plan in zip(sums, self._layout.buckets, strict=True)
        ]
        for part, whole, mine in zip(self.of(self._group.rank), wholes, sums, strict=True):
            first = part.start // BLOCK
            whole[first : first + len(mine)] = mine
        joined = torch.cat(wholes)
        self._group.all_reduce(joined, place="for the gradient's norm").wait()
        return joined

    # -- optimizer state --------------------------------------------------------------------------

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[int, State]]:
        """Yield the number and state of one parameter after another, on all ranks, as an unsharded
        optimizer would have it.

        A collective: every rank iterates to the end. A caller that keeps no state holds at most one
        parameter's whole state.
        """
        mine = {
            place: {
                name: value
                for name, value in optimizer.state.get(view, {}).items()
                if value is not None
            }
            for place, view in zip(self._places, self.views, strict=True)
        }
        known = self._known(mine)
        for number, places in groupby(known, key=lambda place: self.all_pieces[place].parameter):
            state: State = {}
            for place in places:
                self._join(state, self.all_pieces[place], known[place], mine.get(place))
            yield number, state

    def _join(
        self, state: State, piece: OwnedRange, names: Mapping[str, torch.dtype], mine: State | None
    ) -> None:
        """Add to a parameter's state the part that the rank of this piece has."""
        for name, dtype in sorted(names.items()):
            if name in SCALARS:
                value = (
                    torch.zeros((), dtype=dtype)
                    if mine is None
                    else torch.as_tensor(mine[name]).detach().cpu().clone()
                )
                self._group.host.broadcast(
                    value, piece.rank, place=f"for optimizer state {name}"
                ).wait()
                state[name] = value
                continue
            if name not in state:
                state[name] = torch.zeros_like(
                    self.parameters[piece.parameter], dtype=dtype, requires_grad=False
                )
            part = flat_view(state[name])[piece.start : piece.stop]
            if mine is not None:
                part.copy_(mine[name])
            self._group.broadcast(part, piece.rank, place=f"for optimizer state {name}").wait()

    def state_pieces(
        self, optimizer: Optimizer, name_of: Callable[[Tensor], str]
    ) -> Iterator[TensorPiece]:
        """The optimizer's state of this rank's pieces, named "state/parameter". A state that is one
        number for a whole parameter comes with the first piece.
        """
        for piece, view in zip(self.pieces, self.views, strict=True):
            whole = self.parameters[piece.parameter]
            for state, value in optimizer.state.get(view, {}).items():
                name = f"{state}/{name_of(whole)}"
                if state not in SCALARS and isinstance(value, Tensor):
                    yield TensorPiece(name, value, piece.start, tuple(whole.shape), whole.stride())
                elif value is not None and piece.start == 0:
                    yield TensorPiece(name, torch.as_tensor(value))

    def cut_state(self, optimizer: Optimizer, number: int, whole: State) -> None:
        """Give this rank's pieces of a parameter their part of its state."""
        like = self.parameters[number]
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter != number:
                continue
            for name, value in whole.items():
                if isinstance(value, Tensor) and name not in SCALARS:
                    value = flat_like(value.to(like.device, like.dtype), like)[
                        piece.start : piece.stop
                    ]
                optimizer.state[view][name] = value.clone() if isinstance(value, Tensor) else value

    @property
    def _places(self) -> list[int]:
        return [
            place for place, piece in enumerate(self.all_pieces) if piece.rank == self._group.rank
        ]

    def _known(self, mine: dict[int, State]) -> dict[int, dict[str, torch.dtype]]:
        """Return which state each piece has, with its dtype. The order, by parameter, is the same
        on all ranks.
        """
        ours = [
            [place, {name: str(torch.as_tensor(value).dtype) for name, value in state.items()}]
            for place, state in mine.items()
            if state
        ]
        joined = {
            place: {
                name: getattr(torch, dtype.removeprefix("torch.")) for name, dtype in names.items()
            }
            for known in everybodys(ours, self._group.host, "for the optimizer's state")
            for place, names in known
        }
        return {
            place: joined[place]
            for place in sorted(joined, key=lambda place: (self.all_pieces[place].parameter, place))
        }


class WholeParameters:
    """Whole parameters, each of which one rank of a group owns and updates. Every rank makes it and
    calls its methods alike.

    This is for optimizers that must see a whole parameter, for unknown optimizers, and for models
    too small to be cut into slices. The user's optimizer holds the parameters themselves. Their
    memory stays where it is.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        self.parameters, self._group = parameters, group
        loads = [0] * group.size
        self._owners = [0] * len(parameters)
        for number in sorted(
            range(len(parameters)), key=lambda number: -parameters[number].numel()
        ):
            owner = loads.index(min(loads))
            self._owners[number] = owner
            loads[owner] += parameters[number].numel()
        self._owner_of = {
            id(each): owner for each, owner in zip(parameters, self._owners, strict=True)
        }

    def mine_of(self, parameter: Tensor) -> list[Tensor]:
        """A list of the parameter if this rank owns it, else an empty list."""
        return [parameter] if self._owner_of[id(parameter)] == self._group.rank else []

    def take_gradients(self) -> None:
        """Do nothing: the optimizer finds the gradients at the parameters."""

    def gather(self) -> None:
        """After this rank's parameters are updated: send them to all ranks, and receive theirs."""
        if self._group.size == 1:
            return
        works: list[tuple[int, list[Tensor], Tensor, Work]] = []
        by_memory: dict[Any, list[Tensor]] = {}
        for parameter, owner in zip(self.parameters, self._owners, strict=True):
            by_memory.setdefault((owner, parameter.dtype, parameter.device), []).append(
                parameter.detach()
            )
        for (owner, _, _), members in by_memory.items():
            flat = torch.cat([each.reshape(-1) for each in members])
            works.append(
                (
                    owner,
                    members,
                    flat,
                    self._group.broadcast(flat, owner, place="for updated parameters"),
                )
            )
        for owner, members, flat, work in works:
            work.wait()
            if owner != self._group.rank:
                for each, part in zip(
                    members, flat.split([each.numel() for each in members]), strict=True
                ):
                    each.copy_(part.view(each.shape))

    # -- optimizer state --------------------------------------------------------------------------

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[int, State]]:
        """Yield the number and state of one parameter after another, on all ranks.

        A collective: every rank iterates to the end. Raises UsageError for state that is neither
        tensors nor plain values.
        """
        mine = {
            number: {
                name: _described(name, value) for name, value in optimizer.state[parameter].items()
            }
            for number, parameter in enumerate(self.parameters)
            if self._owners[number] == self._group.rank and parameter in optimizer.state
        }
        said = everybodys(mine, self._group.host, "for what optimizer state there is")
        for number, parameter in enumerate(self.parameters):
            known = said[self._owners[number]].get(str(number))
            if known is not None:
                yield (
                    number,
                    {
                        name: self._value(optimizer, number, parameter, name, each)
                        for name, each in known.items()
                    },
                )

    def _value(
        self, optimizer: Optimizer, number: int, parameter: Tensor, name: str, described: Any
    ) -> Any:
        if described[0] == "plain":
            return decoded(described[1])
        _, dtype, shape, on_cpu = described
        owner = self._owners[number]
        if owner == self._group.rank:
            tensor = optimizer.state[parameter][name].detach().clone()
        else:
            tensor = torch.empty(
                shape, dtype=getattr(torch, dtype), device="cpu" if on_cpu else parameter.device
            )
        group = self._group.host if on_cpu else self._group
        group.broadcast(tensor, owner, place=f"for optimizer state {name}").wait()
        return tensor

    def cut_state(self, optimizer: Optimizer, number: int, whole: State) -> None:
        """Give a parameter's owner its state."""
        parameter = self.parameters[number]
        if self._owners[number] == self._group.rank:
            optimizer.state[parameter] = {
                name: _fitting(value, name, parameter) for name, value in whole.items()
            }


def _described(name: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [
            "tensor",
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            value.device.type == "cpu",
        ]
    return ["plain", encoded(value, f"the optimizer's state {name}")]


def _fitting(value: Any, name: str, parameter: Tensor) -> Any:
    """Convert state as torch's `Optimizer.load_state_dict` does: to the parameter's device and
    dtype, except for the count of steps.
    """
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        return value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
    return value.to(device=parameter.device, dtype=dtype, copy=True)


def places(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each name, parameter, and its place in a flat tensor with the layout of the bucket."""
    for span, parameter in zip(bucket.spans, bucket.parameters, strict=True):
        yield span.name, parameter, view_of(flat, span, parameter)


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's elements in the memory order of `like`: a view if both have the same strides."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if tensor.stride() != like.stride() and tensor.numel() > 1:
        tensor = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return flat_view(tensor)
