"""The interface between the Stepper and the part of the model that a rank holds: the whole model
(`ModelShard`), or a part of a split model (model_parallel/).

The Stepper sums gradients among the ranks that hold the same part; the parameters are plain tensors
of this rank. All other communication among the ranks of one split model goes through this
interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.checks.divergence import Named
from lockstep.collectives.group import Group
from lockstep.config.mesh import Mesh
from lockstep.gradients.reducer import Reducer
from lockstep.updates.norm_and_clip import Norm, whole_norm


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

    def form(self, stepper: Any) -> Any:
        """Return how a checkpoint divides the tensors of the model that `stepper` trains
        (checkpoints/form.py); None for a whole model.
        """
        return None
