"""The interface between the Stepper and the part of the model that a rank holds: the whole model
(`ModelShard`), or a part of a split model (model_parallel/).

The Stepper sums gradients among the ranks that hold the same part; the parameters are plain tensors
of this rank. All other communication among the ranks of one split model goes through this
interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.identity import under_all_names, weights
from lockstep.checkpoints.pieces import (
    StoredTensor,
    TensorPiece,
    method_pieces,
    read_all,
    shared_out,
)
from lockstep.checks.divergence import Named
from lockstep.collectives.group import Group
from lockstep.config.mesh import Mesh
from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer
from lockstep.updates.norm_and_clip import Norm, whole_norm

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by name."""


class CheckpointForm:
    """How the tensors of a Stepper's model and optimizer are distributed over the ranks, for
    checkpoints. Names are those of the whole model.

    Here every rank has all tensors, except that a sharded update divides the optimizer's state. A
    split model has a form of its own.
    """

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[Mapping[str, Tensor] | Sequence[TensorPiece] | None, list[TensorPiece]]:
        """Return what this rank writes: of the model, and of all other state. In the model's
        place, None means that this rank writes nothing of it.
        """
        stepper = self._stepper
        group = self._stepper.everyone
        model = under_all_names(stepper.update.model(weights(stepper.model)), stepper.model)
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


class ModelShard:
    """The part of the model that this rank holds: here, the whole model. A part of a split model
    (model_parallel/split_model.py) overrides what differs.
    """

    mesh: Mesh | None = None
    """The mesh over which the model is split; None if every rank holds the whole model."""
    norm: Norm = staticmethod(whole_norm)
    """The function that computes the norm of the whole model's gradient."""
    reports = True
    """Whether this rank reports the weights and losses of its micro-batches. Of the ranks that
    compute the same micro-batches, exactly one reports.
    """

    def replicas(self, everyone: Group) -> Group:
        """Return the ranks of `everyone` that hold the same part of the model. Gradients are
        summed among them.
        """
        return everyone

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        """Return pairs of ranks and tensors: these tensors must be equal on these ranks.
        `replicas`: the ranks with the same part of the model.
        """
        return [(replicas, named)]

    def collect(self, reducer: Reducer) -> None:
        """Move the gradients to the parameters of `reducer`, after the last backward of a window.
        Autograd puts those of a whole model there. Every rank calls it.
        """

    def sent(self) -> int:
        """Return the bytes that this rank has sent to ranks that hold other parts of its model.
        Only messages of Lockstep's own groups are counted.
        """
        return 0

    def optimizer_name(self, name: str) -> str:
        """Return the name, in the whole model, under which checkpoints store the optimizer state
        of the parameter `name`.
        """
        return name

    def form(self, stepper: Any) -> CheckpointForm:
        """Return the checkpoint form of the model that `stepper` trains."""
        return CheckpointForm(stepper)


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
