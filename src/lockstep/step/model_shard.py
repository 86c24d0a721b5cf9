"""What a rank holds of the model: all of it (`Whole`), or its part of a split one
(model_parallel/), behind one hook of the Stepper.

The Stepper sums gradients among the ranks that hold the same part, of parameters that are plain
tensors of this rank. Everything else that the ranks of one split model have to do with each other
goes through this hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

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
from lockstep.updates.norm import Norm, whole_norm

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by name."""


class CheckpointForm(Protocol):
    """How the tensors of one Stepper's model and optimizer lie on the ranks. Names are the whole
    model's.
    """

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[Mapping[str, Tensor] | Sequence[TensorPiece] | None, list[TensorPiece]]:
        """What this rank writes of the model, and of everything else."""
        ...

    def groups(self, mine: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """The names in the optimizer's groups, over all ranks that hold one model."""
        ...

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What the optimizer keeps beside tensors, over the same ranks."""
        ...

    def compare(self, checkpoint: Checkpoint) -> None:
        """Raise a UsageError where the checkpoint is another model's."""
        ...

    def load(self, checkpoint: Checkpoint) -> None:
        """Take what is here of the model of a checkpoint that was compared."""
        ...

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What is here of the optimizer's tensors, "state/parameter" by name."""
        ...


class ModelShard(Protocol):
    """What this rank holds of the model."""

    @property
    def mesh(self) -> Mesh | None:
        """None where every rank holds the whole model."""
        ...

    @property
    def norm(self) -> Norm:
        """The norm of the whole model's gradient."""
        ...

    @property
    def reports(self) -> bool:
        """Whether this rank tells the weights and losses of its micro-batches. Of the ranks that
        walk the same ones, one does.
        """
        ...

    def replicas(self, everyone: Group) -> Group:
        """Of all ranks of a training, those with the same part of the model. Gradients are
        summed among them.
        """
        ...

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        """Which of these tensors of this rank must be equal on which ranks. `replicas`: those
        with the same part of the model.
        """
        ...

    def collect(self, reducer: Reducer) -> None:
        """After the last backward: bring the gradients to the parameters that `reducer` knows.
        Every rank calls it.
        """
        ...

    def sent(self) -> int:
        """Bytes that this rank has sent to other holders of the same model, as far as Lockstep's
        own groups count them.
        """
        ...

    def optimizer_name(self, name: str) -> str:
        """The name in the whole model under which checkpoints know a parameter's optimizer
        state.
        """
        ...

    def form(self, stepper: Any) -> CheckpointForm:
        """How checkpoints see the model that a Stepper trains."""
        ...


class Whole:
    """Every rank holds the whole model."""

    mesh: Mesh | None = None
    norm: Norm = staticmethod(whole_norm)
    reports = True

    def replicas(self, everyone: Group) -> Group:
        return everyone

    def alike(self, replicas: Group, named: Named) -> Sequence[tuple[Group, Named]]:
        return [(replicas, named)]

    def collect(self, reducer: Reducer) -> None:
        """Autograd has put them there."""

    def sent(self) -> int:
        return 0

    def optimizer_name(self, name: str) -> str:
        return name

    def form(self, stepper: Any) -> CheckpointForm:
        return WholeForm(stepper)


class WholeForm:
    """Every rank has everything, but for the optimizer's state where the update is sharded."""

    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper

    def pieces(
        self, name_of: Callable[[Tensor], str]
    ) -> tuple[Mapping[str, Tensor] | None, list[TensorPiece]]:
        stepper, group = self._stepper, self._stepper.everyone
        model = under_all_names(stepper.update.model(weights(stepper.model)), stepper.model)
        everywhere, mine = stepper.update.optimizer.pieces(name_of)
        common, own = method_pieces(stepper.keepers(), group.rank)
        heavy = sum(tensor.nbytes for tensor in model.values())
        pieces = [
            *shared_out([*everywhere, *common], group.rank, group.size, heavy),
            *mine,
            *own,
        ]
        return model if group.rank == 0 else None, pieces

    def groups(self, mine: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        return mine

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        return mine

    def compare(self, checkpoint: Checkpoint) -> None:
        ours = forms_of(weights(self._stepper.model).items())
        compare_forms(ours, forms_of(checkpoint.model().items()))

    def load(self, checkpoint: Checkpoint) -> None:
        copy_stored(checkpoint.model(), self._stepper.model)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        return read_all(checkpoint.optimizer())


@torch.no_grad()
def copy_stored(tensors: Mapping[str, StoredTensor], model: nn.Module) -> None:
    """Read tensors into those of a model that have their names."""
    ours = weights(model)
    for name, tensor in tensors.items():
        ours[name].copy_(tensor.read())


def forms_of(tensors: Iterable[tuple[str, Tensor | StoredTensor]]) -> Forms:
    """The shape and dtype of each, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def compare_forms(ours: Forms, theirs: Forms) -> None:
    """Raise a UsageError where a checkpoint's model has other names, shapes or dtypes."""
    difference = ""
    if missing := sorted(ours.keys() ^ theirs.keys()):
        where = "the model lacks" if missing[0] in theirs else "the checkpoint lacks"
        difference = f"{where} {missing[0]!r}"
    else:
        for name, (shape, dtype) in ours.items():
            other, was = theirs[name]
            if (shape, dtype) != (other, was):
                difference = f"{name} is {list(other)} {was} there, and {list(shape)} {dtype} here"
                break
    if difference:
        raise UsageError(
            "checkpoint-of-another-model",
            checkpoint="the checkpoint",
            task="this training",
            differences=difference,
        )
