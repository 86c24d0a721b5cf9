"""A split model's state in checkpoints: the names and whole tensors of an unsplit one, so that any mesh goes on from any other.

Every rank writes what it alone has, or what it has as the first of several; every rank reads whole tensors, one after the other, and takes
its part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.pieces import Piece
from lockstep.collectives.texts import everybodys
from lockstep.errors import UsageError
from lockstep.model_parallel.part import Part
from lockstep.stepper import Stepper
from lockstep.stepper_state import compare_forms, forms_of


class Split:
    """Of a Stepper that trains this rank's part of a model."""

    def __init__(self, stepper: Stepper) -> None:
        assert isinstance(stepper.held, Part)
        self._stepper: Stepper = stepper
        self._part: Part = stepper.held

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[list[Piece], list[Piece]]:
        return self._of_model(), self._of_optimizer(name_of)

    def _of_model(self) -> list[Piece]:
        found: dict[str, list[Piece]] = {}
        for name, tensor in self._part.module.state_dict(keep_vars=True).items():
            known = self._part.checkpoint_name(name)
            if known not in found:
                found[known] = [replace(each, name=known) for each in self._pieces("", name, tensor.detach())]
        return [each for pieces in found.values() for each in pieces]

    def _of_optimizer(self, name_of: Callable[[Tensor], str]) -> list[Piece]:
        local = {name_of(parameter): name for name, parameter in self._part.module.named_parameters()}
        everywhere, mine = self._stepper.update.pieces(name_of)
        found = []
        for piece in everywhere:
            state, _, name = piece.name.partition("/")
            found += [replace(each, name=piece.name) for each in self._pieces(f"{state}/", local.get(name, name), piece.data)]
        for piece in mine:  # of the sharded update: what no other rank along the data axis has
            if self._part.first_of_pipeline(piece.name.partition("/")[2]):
                found.append(piece)
        return found

    def _pieces(self, prefix: str, name: str, tensor: Tensor) -> list[Piece]:
        """What this rank writes of a tensor; all ranks along the tensor axis are here together."""
        pieces = self._part.locals.pieces(prefix, name, tensor, self._part.axes.tensor)
        return pieces if self._part.writes(name) else []

    def groups(self, mine: Sequence[Sequence[str]]) -> list[list[str]]:
        said = everybodys([list(names) for names in mine], self._part.world.control, "for the optimizer's groups")
        counts = [len(groups) for groups in said]
        if len(set(counts)) > 1:
            raise UsageError(
                f"the optimizer has {', '.join(map(str, counts))} parameter groups on ranks 0, 1, ...: make as many on all, also where one is empty"
            )
        order = {name: number for number, name in enumerate(self._part.parameter_names)}
        joined = [{name for groups in said for name in groups[number]} for number in range(len(mine))]
        return [sorted(names, key=lambda name: (order.get(name, len(order)), name)) for names in joined]

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        said = everybodys(mine, self._part.world.control, "for the optimizer's numbers")
        return {name: value for each in said for name, value in each.items()}

    def compare(self, checkpoint: Checkpoint) -> None:
        compare_forms(self._part.forms, forms_of(checkpoint.model()))  # one tensor after the other

    def load(self, checkpoint: Checkpoint) -> None:
        here: dict[str, str] = {}
        for name in self._part.module.state_dict(keep_vars=True):
            here.setdefault(self._part.checkpoint_name(name), name)
        self._part.locals.load((here[name], tensor) for name, tensor in checkpoint.model() if name in here)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        here = {self._part.optimizer_name(name): name for name, _ in self._part.module.named_parameters()}
        found = {}
        for key, tensor in checkpoint.optimizer():
            name = key.partition("/")[2]
            if name in here:
                found[key] = self._part.locals.take(here[name], tensor)
        return found
