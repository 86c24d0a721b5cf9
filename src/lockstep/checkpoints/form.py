"""How the tensors of a Stepper are divided over the ranks that write a checkpoint and read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.pieces import METHOD, StoredTensor, read_all
from lockstep.checks.identity import under_all_names, weights
from lockstep.errors import UsageError
from lockstep.gradients.saved_state import KeepsState, TensorPiece
from lockstep.step.stepper import Stepper
from lockstep.updates.local_steps import LocalSteps

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by name."""


class CheckpointForm:
    """How the tensors of a Stepper's model and optimizer are distributed over the ranks, for
    checkpoints. Names are those of the whole model.

    Here every rank has all tensors, except that a sharded update divides the optimizer's state. A
    split model has a form of its own.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[Mapping[str, Tensor] | Sequence[TensorPiece] | None, list[TensorPiece]]:
        """Return what this rank writes: of the model, and of all other state. In the model's
        place, None means that this rank writes nothing of it.
        """
        stepper = self._stepper
        group = self._stepper.everyone
        tensors = weights(stepper.model)
        if isinstance(stepper.update, LocalSteps):
            tensors |= stepper.update.synchronized_tensors()
        model = under_all_names(tensors, stepper.model)
        common, local = stepper.update.optimizer.pieces(name_of)
        method_common, method_local = method_pieces(stepper.keepers(), group.rank)
        model_bytes = sum(tensor.nbytes for tensor in model.values())
        shares = shared_out([*common, *method_common], group.rank, group.size, model_bytes)
        pieces = [*shares, *local, *method_local]
        return model if group.rank == 0 else None, pieces

    def groups(self, local: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """Return the parameter names of each optimizer group, joined over all ranks that hold one
        model. `local`: the names on this rank.
        """
        return local

    def numbers(self, local: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state that is not in tensors, joined over the same ranks."""
        return local

    def compare(self, checkpoint: Checkpoint) -> None:
        """Raise a UsageError if the checkpoint belongs to another model."""
        here = forms_of(weights(self._stepper.model).items())
        compare_forms(here, forms_of(checkpoint.model().items()))

    def load(self, checkpoint: Checkpoint) -> None:
        """Load this rank's part of the model from a checkpoint that `compare` has accepted."""
        copy_stored(checkpoint.model(), self._stepper.model)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer's tensors, by the name "state/parameter"."""
        return read_all(checkpoint.optimizer())


def method_pieces(
    parts: Sequence[KeepsState], rank: int
) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """Return the pieces of these states that all ranks have, and those that only this rank has."""
    everywhere = []
    local = []
    for part in parts:
        common, own = part.kept()
        everywhere += [TensorPiece(f"{METHOD}{name}", common[name]) for name in common]
        local += [TensorPiece(f"{METHOD}rank-{rank}/{name}", own[name]) for name in own]
    return everywhere, local


def shared_out(
    pieces: Sequence[TensorPiece], rank: int, size: int, heavy: int
) -> list[TensorPiece]:
    """Of pieces that all ranks have, return those that this rank writes. All ranks get about equal
    bytes; rank 0 has `heavy` bytes already.
    """
    loads = [heavy, *[0] * (size - 1)]
    local = []
    for piece in sorted(pieces, key=lambda piece: (-piece.data.nbytes, piece.name)):
        writer = loads.index(min(loads))
        loads[writer] += piece.data.nbytes
        if writer == rank:
            local.append(piece)
    return local


@torch.no_grad()
def copy_stored(tensors: Mapping[str, StoredTensor], model: nn.Module) -> None:
    """Read stored tensors into the tensors of the same names in `model`."""
    targets = weights(model)
    for name, tensor in tensors.items():
        targets[name].copy_(tensor.read())


def forms_of(tensors: Iterable[tuple[str, Tensor | StoredTensor]]) -> Forms:
    """Return the shape and dtype of each tensor, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def compare_forms(model: Forms, stored: Forms) -> None:
    """Raise a UsageError if a checkpoint's model has other names, shapes or dtypes."""
    difference = _first_difference(model, stored)
    if difference is not None:
        raise UsageError(
            "checkpoint-of-another-model",
            checkpoint="the checkpoint",
            task="this training",
            differences=difference,
        )


def _first_difference(model: Forms, stored: Forms) -> str | None:
    """Return the first difference between a model and a checkpoint in words; None if there is none."""
    unmatched = sorted(model.keys() ^ stored.keys())
    if unmatched:
        owner = "model" if unmatched[0] in stored else "checkpoint"
        return f"the {owner} lacks {unmatched[0]!r}"
    for name, (shape, dtype) in model.items():
        stored_shape, stored_dtype = stored[name]
        if (shape, dtype) != (stored_shape, stored_dtype):
            there = f"{list(stored_shape)} {stored_dtype} there"
            return f"{name} is {there}, and {list(shape)} {dtype} here"
    return None
