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
from lockstep.checks.witness import Item, Witness, of_update
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group

_PLACE = "for the witness of an update"
Step = Callable[[Optimizer, Sequence[Tensor]], None]
"""Takes the optimizer's step with these gradients."""


class SliceUpdate:
    """An optimizer's pieces, copied before its step, and as they are after it."""

    def __init__(
        self, optimizer: Optimizer, pieces: Sequence[nn.Parameter], names: Sequence[str]
    ) -> None:
        self.optimizer, self._pieces, self.names = optimizer, pieces, names
        groups = {
            id(each): number
            for number, group in enumerate(optimizer.param_groups)
            for each in group["params"]
        }
        self.before: list[Tensor] = []
        self.form: list[dict[str, Any]] = []
        """For each piece its name, its group, and the keys and specs of its tensors in `before`."""
        for piece, name in zip(pieces, names, strict=True):
            state = optimizer.state.get(piece, {})
            held = {"weight": piece.detach(), "gradient": piece.grad}
            held |= {key: each for key, each in state.items() if isinstance(each, Tensor)}
            tensors = {key: each for key, each in held.items() if each is not None}
            self.before += [each.detach().clone() for each in tensors.values()]
            self.form.append(
                {
                    "name": name,
                    "group": groups[id(piece)],
                    "tensors": [
                        [
                            key,
                            str(each.dtype).removeprefix("torch."),
                            list(each.shape),
                            each.device.type == "cpu",
                        ]
                        for key, each in tensors.items()
                    ],
                    "plain": {k: v for k, v in state.items() if isinstance(v, int | float)},
                }
            )

    def after(self) -> list[tuple[str, int]]:
        """The names of the pieces, with digests of the owner's weights and state after its step."""
        return _digests(self.optimizer, self._pieces, self.names)


def repeated(
    optimizer: Optimizer, form: Sequence[dict[str, Any]], before: Sequence[Tensor], step: Step
) -> list[tuple[str, int]]:
    """Take the step with copies of such pieces, and return digests of their weights and state."""
    again: Any = object.__new__(type(optimizer))
    again.__dict__.update(optimizer.__dict__)
    again.__dict__.pop("step", None)  # a scheduler's wrapper counts the owner's steps
    again.state = defaultdict(dict)
    again.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    contents, pieces = iter(before), []
    for each in form:
        held = {key: next(contents).clone() for key, *_ in each["tensors"]}
        piece = nn.Parameter(held.pop("weight"))
        piece.grad = held.pop("gradient", None)
        if held or each["plain"]:
            again.state[piece] = {**held, **each["plain"]}
        again.param_groups[each["group"]]["params"].append(piece)
        pieces.append(piece)
    step(again, [piece.grad for piece in pieces if piece.grad is not None])
    return _digests(again, pieces, [each["name"] for each in form])


def check_repeated(
    mine: SliceUpdate, step: Step, group: Group, device: torch.device, witness: Witness
) -> None:
    """After the owner's step, have the next rank take it too, and compare. A collective. Raises
    CorruptResult on all ranks.
    """
    forms = everybodys(mine.form, group.host, _PLACE)
    owner = (group.rank - 1) % group.size
    theirs = _sent_on(mine.before, forms, group, device)
    first = [
        of_update(group.rank, mine.after()),
        of_update(owner, repeated(mine.optimizer, forms[owner], theirs, step)),
    ]

    def once_more() -> Iterator[list[Item]]:
        yield of_update(group.rank, repeated(mine.optimizer, mine.form, mine.before, step))
        yield of_update(owner, repeated(mine.optimizer, forms[owner], theirs, step))

    witness.compare(first, once_more)


def _sent_on(
    before: Sequence[Tensor],
    forms: Sequence[Sequence[dict[str, Any]]],
    group: Group,
    device: torch.device,
) -> list[Tensor]:
    """Send this rank's tensors to the next rank. Return those of the rank before this one."""
    owner, following = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    found = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if on_cpu else device)
        for piece in forms[owner]
        for _, dtype, shape, on_cpu in piece["tensors"]
    ]
    none = torch.empty(0, dtype=torch.uint8)
    leaving = torch.cat([none, *(octets_of(each).cpu() for each in before)])
    arriving = none.new_empty(sum(each.nbytes for each in found))
    to_each, from_each = [0] * group.size, [0] * group.size
    to_each[following], from_each[owner] = leaving.numel(), arriving.numel()
    group.host.exchange(arriving, from_each, leaving, to_each, _PLACE).wait()
    for each, octets in zip(found, arriving.split([each.nbytes for each in found]), strict=True):
        octets_of(each).copy_(octets)
    return found


def _digests(
    optimizer: Optimizer, pieces: Sequence[nn.Parameter], names: Sequence[str]
) -> list[tuple[str, int]]:
    return [
        (
            name,
            digest(
                [
                    piece.detach(),
                    *(e for e in optimizer.state.get(piece, {}).values() if isinstance(e, Tensor)),
                ]
            ),
        )
        for piece, name in zip(pieces, names, strict=True)
    ]
