"""Repeats the update of a slice on another rank than its owner, in a witnessed step
(checks/witness.py).

The owner sends what the update began with (weights, gradients, state) to the next rank, which takes
the same step. Both share digests of their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checks.divergence import digest, octets_of
from lockstep.checks.witness import Item, Witness, update_items
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.updates.shards import empty_of, spec_of

_PLACE = "for the witness of an update"
Step = Callable[[Optimizer, Sequence[Tensor]], None]
"""Takes the optimizer's step with these gradients."""


class SliceUpdate:
    """An optimizer's pieces, and copies of them from before its step."""

    def __init__(
        self, optimizer: Optimizer, pieces: Sequence[nn.Parameter], names: Sequence[str]
    ) -> None:
        self.optimizer = optimizer
        self.pieces = pieces
        self.names = names
        groups: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            groups |= dict.fromkeys(map(id, group["params"]), number)
        self.before: list[Tensor] = []
        self.form: list[dict[str, Any]] = []
        """For each piece its name, its group, and the keys and specs of its tensors in `before`."""
        for piece, name in zip(pieces, names, strict=True):
            state = optimizer.state.get(piece, {})
            tensors = {"weight": piece.detach()}
            if piece.grad is not None:
                tensors["gradient"] = piece.grad
            tensors |= {key: value for key, value in state.items() if isinstance(value, Tensor)}
            self.before += [tensor.detach().clone() for tensor in tensors.values()]
            self.form.append(
                {
                    "name": name,
                    "group": groups[id(piece)],
                    "tensors": [[key, *spec_of(tensor)] for key, tensor in tensors.items()],
                    "plain": {
                        key: value for key, value in state.items() if isinstance(value, int | float)
                    },
                }
            )


def repeated(
    optimizer: Optimizer, form: Sequence[dict[str, Any]], before: Sequence[Tensor], step: Step
) -> list[tuple[str, int]]:
    """Take the step with copies of such pieces, and return digests of their weights and state."""
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a scheduler's wrapper counts the owner's steps
    copy.state = defaultdict(dict)
    copy.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    contents = iter(before)
    pieces = []
    for description in form:
        tensors = {key: next(contents).clone() for key, *_ in description["tensors"]}
        piece = nn.Parameter(tensors.pop("weight"))
        piece.grad = tensors.pop("gradient", None)
        state = {**tensors, **description["plain"]}
        if state:
            copy.state[piece] = state
        copy.param_groups[description["group"]]["params"].append(piece)
        pieces.append(piece)
    step(copy, [piece.grad for piece in pieces if piece.grad is not None])
    return _digests(copy, pieces, [description["name"] for description in form])


def check_repeated(
    local: SliceUpdate, step: Step, group: Group, device: torch.device, witness: Witness
) -> None:
    """After the owner's step, have the next rank take it too, and compare. A collective. Raises
    CorruptResult on all ranks.
    """
    forms = everybodys(local.form, group.host, _PLACE)
    owner = (group.rank - 1) % group.size
    remote = _exchanged(local.before, forms, group, device)

    def of_owner() -> list[Item]:
        return update_items(owner, repeated(local.optimizer, forms[owner], remote, step))

    def once_more() -> Iterator[list[Item]]:
        own = repeated(local.optimizer, local.form, local.before, step)
        yield update_items(group.rank, own)
        yield of_owner()

    after = _digests(local.optimizer, local.pieces, local.names)
    witness.compare([update_items(group.rank, after), of_owner()], once_more)


def _exchanged(
    before: Sequence[Tensor],
    forms: Sequence[Sequence[dict[str, Any]]],
    group: Group,
    device: torch.device,
) -> list[Tensor]:
    """Send this rank's tensors to the next rank. Return those of the rank before this one."""
    received = []
    previous_rank = (group.rank - 1) % group.size
    for piece in forms[previous_rank]:
        received += [empty_of(spec, device) for _, *spec in piece["tensors"]]
    empty = torch.empty(0, dtype=torch.uint8)
    outgoing = torch.cat([empty, *(octets_of(tensor).cpu() for tensor in before)])
    sizes = [tensor.nbytes for tensor in received]
    incoming = empty.new_empty(sum(sizes))
    send_sizes = [0] * group.size
    send_sizes[(group.rank + 1) % group.size] = outgoing.numel()
    receive_sizes = [0] * group.size
    receive_sizes[previous_rank] = incoming.numel()
    group.host.exchange(incoming, receive_sizes, outgoing, send_sizes, _PLACE).wait()
    for tensor, data in zip(received, incoming.split(sizes), strict=True):
        octets_of(tensor).copy_(data)
    return received


def _digests(
    optimizer: Optimizer, pieces: Sequence[nn.Parameter], names: Sequence[str]
) -> list[tuple[str, int]]:
    """Return the names of the pieces, with digests of their weights and state."""
    digests = []
    for piece, name in zip(pieces, names, strict=True):
        values = [piece.detach(), *optimizer.state.get(piece, {}).values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        digests.append((name, digest(tensors)))
    return digests
