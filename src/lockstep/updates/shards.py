"""Parameters cut into shards: every rank updates its slices of them, then all exchange the updated
slices.

    layout      the parameters one after another in flat tensors (gradients/layout.py), which
                become their memory
    slice       a rank's part of a flat tensor (collectives/addition_order.py)
    piece       the part of one parameter in a slice: a view, which the user's optimizer treats as
                a parameter

An elementwise optimizer does to a piece exactly what it would do to the whole. shard_memory.py
defines where the flat tensors lie, and how slices reach the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.collectives.addition_order import BLOCK, slice_of
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.collectives.plain_json import decoded, dtype_name, encoded
from lockstep.errors import UsageError
from lockstep.gradients.bucket import Bucket, view_of
from lockstep.gradients.layout import Layout, Span
from lockstep.gradients.saved_state import TensorPiece
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


def pieces_of(layout: Layout, slices: Sequence[range]) -> dict[int, Span]:
    """Return what these slices, one of each bucket, hold of each parameter, by its number: elements
    [start, stop) of the parameter, in the order of memory.
    """
    pieces = {}
    for bucket, part in zip(layout.buckets, slices, strict=True):
        for span in bucket.spans:
            start = max(part.start, span.start) - span.start
            stop = min(part.stop, span.stop) - span.start
            if start < stop:
                pieces[span.parameter] = replace(span, start=start, stop=stop)
    return pieces


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
        self.parameters = parameters
        self._layout = layout
        self._group = group
        self.owners = owners or group.size
        self._together = together
        self._pieces_by_rank = [pieces_of(layout, self.of(rank)) for rank in range(group.size)]
        self.someone_has_none = not all(self._pieces_by_rank)
        self.pieces = list(self._pieces_by_rank[group.rank].values())
        self.views = [nn.Parameter(view) for view in self._allocate()]
        self._local_pieces = {
            id(parameters[piece.parameter]): [view]
            for piece, view in zip(self.pieces, self.views, strict=True)
        }

    def _allocate(self) -> list[Tensor]:
        """Put the parameters into flat memory. Return this rank's pieces, as it sees them."""
        memory = shard_memory(self._layout, self._group, self.of, together=self._together)
        self._memory = memory
        spans = {}
        flats = zip(self._layout.buckets, memory.flats, memory.updated, strict=True)
        for plan, flat, updated in flats:
            for span in plan.spans:
                spans[span.parameter] = (span, flat, updated)
        self._homes: list[Tensor] = []
        parameter_values = []
        for number, parameter in enumerate(self.parameters):
            span, flat, _ = spans[number]
            home = view_of(flat, span, parameter)
            self._homes.append(home)
            parameter_values.append((flat_view(home), flat_like(parameter, home)))
        self._seen: list[Tensor] = []
        self._updated: list[Tensor] = []
        piece_values = []
        for piece in self.pieces:
            span, flat, updated = spans[piece.parameter]
            elements = slice(span.start + piece.start, span.start + piece.stop)
            self._seen.append(flat[elements])
            self._updated.append(updated[elements])
            _, values = parameter_values[piece.parameter]
            piece_values.append((updated[elements], values[piece.start : piece.stop]))
        memory.fill(parameter_values, piece_values)
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            parameter.data = home
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        return self._seen

    def of(self, rank: int) -> list[range]:
        """A rank's elements of each bucket."""
        if rank >= self.owners:
            return [range(0) for _ in self._layout.buckets]
        return [slice_of(plan.numel, rank, self.owners) for plan in self._layout.buckets]

    def local_pieces(self, parameter: Tensor) -> list[nn.Parameter]:
        """This rank's pieces of a parameter."""
        return self._local_pieces.get(id(parameter), [])

    def slices(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """This rank's slices of flat tensors with this layout."""
        parts = self.of(self._group.rank)
        return [flat[part.start : part.stop] for flat, part in zip(flats, parts, strict=True)]

    def take_gradients(self) -> None:
        """Before the pieces are updated: give them their part of the parameters' `.grad` (or None),
        and the memory in which they are updated.
        """
        self._restore_memory()
        self._memory.open()
        for piece, view, updated in zip(self.pieces, self.views, self._updated, strict=True):
            parameter = self.parameters[piece.parameter]
            view.data = updated
            view.grad = None
            if parameter.grad is not None:
                gradient = flat_like(parameter.grad, parameter)
                view.grad = gradient[piece.start : piece.stop]

    def _restore_memory(self) -> None:
        """Copy parameters that were given other memory (`parameter.data = ...`) back into ours."""
        homes = zip(self.parameters, self._homes, self._addresses, strict=True)
        for parameter, home, address in homes:
            if parameter.data_ptr() != address:
                parameter.data = home.copy_(parameter.data)

    def differing(self) -> Sequence[Tensor]:
        """The tensors that must be equal on all ranks, because the next update overwrites them."""
        self._restore_memory()
        return self._memory.differing()

    def gradients(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The gradients of this rank's pieces, with their parameters' names."""
        for piece, view in zip(self.pieces, self.views, strict=True):
            if view.grad is not None:
                yield names[piece.parameter], view.grad

    def gather(self) -> None:
        """After the pieces are updated: make every rank see all ranks' pieces."""
        self._memory.gather()
        for view, seen in zip(self.views, self._seen, strict=True):
            view.data = seen
        # so that autograd detects a backward through an old graph
        torch.autograd.graph.increment_version(self.parameters)

    def everybodys(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the values of all blocks, in order. `sums[i]` are those of this rank's slice of
        flat tensor i.
        """
        blocks = []
        parts = self.of(self._group.rank)
        for part, plan, local in zip(parts, self._layout.buckets, sums, strict=True):
            values = local.new_zeros(-(-plan.numel // BLOCK))
            first = part.start // BLOCK
            values[first : first + len(local)] = local
            blocks.append(values)
        joined = torch.cat(blocks)
        self._group.all_reduce(joined, place="for the gradient's norm").wait()
        return joined

    # -- optimizer state --------------------------------------------------------------------------

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[int, State]]:
        """Yield the number and state of one parameter after another, on all ranks, as an unsharded
        optimizer would have it.

        A collective: every rank iterates to the end. A caller that keeps no state holds at most one
        parameter's whole state.
        """
        local = {}
        for piece, view in zip(self.pieces, self.views, strict=True):
            dtypes = {}
            for name, value in optimizer.state.get(view, {}).items():
                if value is not None:
                    dtypes[name] = dtype_name(torch.as_tensor(value).dtype)
            local[piece.parameter] = dtypes
        by_rank = everybodys(local, self._group.host, "for the optimizer's state")
        for number in range(len(self.parameters)):
            state: State = {}
            for rank, dtypes_of in enumerate(by_rank):
                self._join(optimizer, state, number, rank, dtypes_of.get(str(number), {}))
            if state:
                yield number, state

    def _join(
        self,
        optimizer: Optimizer,
        state: State,
        number: int,
        rank: int,
        dtypes: Mapping[str, str],
    ) -> None:
        """Add to a parameter's state the part that `rank` has of it, with these dtypes."""
        parameter = self.parameters[number]
        values: State = {}
        if rank == self._group.rank and dtypes:
            (view,) = self.local_pieces(parameter)
            values = optimizer.state[view]
        for name, dtype_text in sorted(dtypes.items()):
            dtype = getattr(torch, dtype_text)
            group = self._group
            if name in SCALARS:
                group = group.host
                part = torch.zeros((), dtype=dtype)
                if values:
                    part = torch.as_tensor(values[name]).detach().cpu().clone()
                state[name] = part
            else:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                piece = self._pieces_by_rank[rank][number]
                part = flat_view(state[name])[piece.start : piece.stop]
                if values:
                    part.copy_(values[name])
            group.broadcast(part, rank, place=f"for optimizer state {name}").wait()

    def state_pieces(
        self, optimizer: Optimizer, name_of: Callable[[Tensor], str]
    ) -> Iterator[TensorPiece]:
        """The optimizer's state of this rank's pieces, named "state/parameter". A state that is one
        number for a whole parameter comes with the first piece.
        """
        for piece, view in zip(self.pieces, self.views, strict=True):
            parameter = self.parameters[piece.parameter]
            shape = tuple(parameter.shape)
            for state, value in optimizer.state.get(view, {}).items():
                name = f"{state}/{name_of(parameter)}"
                if state not in SCALARS and isinstance(value, Tensor):
                    yield TensorPiece(name, value, piece.start, shape, parameter.stride())
                elif value is not None and piece.start == 0:
                    yield TensorPiece(name, torch.as_tensor(value))

    def cut_state(self, optimizer: Optimizer, number: int, state: State) -> None:
        """Give this rank's pieces of a parameter their part of its state."""
        parameter = self.parameters[number]
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter != number:
                continue
            for name, value in state.items():
                if isinstance(value, Tensor):
                    if name not in SCALARS:
                        values = value.to(parameter.device, parameter.dtype)
                        value = flat_like(values, parameter)[piece.start : piece.stop]
                    value = value.clone()
                optimizer.state[view][name] = value


class WholeParameters:
    """Whole parameters, each of which one rank of a group owns and updates. Every rank makes it and
    calls its methods alike.

    This is for optimizers that must see a whole parameter, for unknown optimizers, and for models
    too small to be cut into slices. The user's optimizer holds the parameters themselves. Their
    memory stays where it is.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Group) -> None:
        self.parameters = parameters
        self._group = group
        self._owners: dict[int, int] = {}  # ranks, by the parameters' identity
        loads = [0] * group.size
        for parameter in sorted(parameters, key=lambda parameter: -parameter.numel()):
            owner = loads.index(min(loads))
            self._owners[id(parameter)] = owner
            loads[owner] += parameter.numel()

    def local_pieces(self, parameter: Tensor) -> list[Tensor]:
        """A list of the parameter if this rank owns it, else an empty list."""
        if self._owners[id(parameter)] == self._group.rank:
            return [parameter]
        return []

    def take_gradients(self) -> None:
        """Do nothing: the optimizer finds the gradients at the parameters."""

    def gather(self) -> None:
        """After this rank's parameters are updated: send them to all ranks, and receive theirs."""
        if self._group.size == 1:
            return
        by_memory: dict[Any, list[Tensor]] = {}
        for parameter in self.parameters:
            key = self._owners[id(parameter)], parameter.dtype, parameter.device
            by_memory.setdefault(key, []).append(parameter.detach())
        works = []
        for (owner, _, _), tensors in by_memory.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            work = self._group.broadcast(flat, owner, place="for updated parameters")
            works.append((owner, tensors, flat, work))
        for owner, tensors, flat, work in works:
            work.wait()
            if owner != self._group.rank:
                parts = flat.split([tensor.numel() for tensor in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    # -- optimizer state --------------------------------------------------------------------------

    def whole_states(self, optimizer: Optimizer) -> Iterator[tuple[int, State]]:
        """Yield the number and state of one parameter after another, on all ranks.

        A collective: every rank iterates to the end. Raises UsageError for state that is neither
        tensors nor plain values.
        """
        local = {}
        for number, parameter in enumerate(self.parameters):
            if self.local_pieces(parameter) and parameter in optimizer.state:
                values = optimizer.state[parameter]
                local[number] = {name: _described(name, value) for name, value in values.items()}
        by_rank = everybodys(local, self._group.host, "for what optimizer state there is")
        for number, parameter in enumerate(self.parameters):
            owned = by_rank[self._owners[id(parameter)]]
            if str(number) in owned:
                descriptions = owned[str(number)]
                state = {
                    name: self._value(optimizer, parameter, name, description)
                    for name, description in descriptions.items()
                }
                yield number, state

    def _value(self, optimizer: Optimizer, parameter: Tensor, name: str, description: Any) -> Any:
        """Return a value of a parameter's state, which its owner sends unless it is plain."""
        kind, *spec = description
        if kind == "plain":
            return decoded(*spec)
        owner = self._owners[id(parameter)]
        tensor = empty_of(spec, parameter.device)
        if owner == self._group.rank:
            tensor = optimizer.state[parameter][name].detach().clone()
        group = self._group.host if tensor.device.type == "cpu" else self._group
        group.broadcast(tensor, owner, place=f"for optimizer state {name}").wait()
        return tensor

    def cut_state(self, optimizer: Optimizer, number: int, state: State) -> None:
        """Give a parameter's owner its state."""
        parameter = self.parameters[number]
        if self.local_pieces(parameter):
            optimizer.state[parameter] = {
                name: _fitting(value, name, parameter) for name, value in state.items()
            }


def spec_of(tensor: Tensor) -> list[Any]:
    """Return a tensor's dtype, shape, and whether it is on the CPU, for JSON."""
    return [dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type == "cpu"]


def empty_of(spec: Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor like the one of this `spec_of`, on `device` if that was not on the CPU."""
    dtype, shape, on_cpu = spec
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if on_cpu else device)


def _described(name: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return ["tensor", *spec_of(value)]
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


def parameter_views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Yield each name, parameter, and its view of a flat tensor with the layout of the bucket."""
    for span, parameter in zip(bucket.spans, bucket.parameters, strict=True):
        yield span.name, parameter, view_of(flat, span, parameter)


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's elements in the memory order of `like`: a view if both have the same strides."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.stride() != like.stride() and tensor.numel() > 1:
        ordered = torch.empty_strided(
            like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return flat_view(tensor)
