"""The gradients of a window that is not complete, out of sight: until its last backward every `.grad`
is None, so that nobody clips, scales or reads a part of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lockstep.errors import UsageError
from lockstep.gradients.reducer import Reducer


class HiddenSum:
    """Hides the sum of a Reducer between the backwards of a user's own loop.

    Args:
        reducer: of the model.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self._hidden: Sequence[Tensor | None] | None = None

    def hide(self) -> None:
        """Set every `.grad` to None until `show`."""
        hidden = []
        for parameter in self.reducer.parameters:
            hidden.append(parameter.grad)
            parameter.grad = None
        self._hidden = hidden

    def show(self) -> None:
        """Undo `hide`. Raises UsageError if a gradient was written meanwhile."""
        if self._hidden is None:
            return
        for number, parameter in enumerate(self.reducer.parameters):
            if parameter.grad is not None:
                name = self.reducer.names[number]
                raise UsageError("partial-gradient-written", parameter=name)
            parameter.grad = self._hidden[number]
        self._hidden = None

    def versions(self) -> list[int]:
        """Return the versions of the sums: a write to a gradient changes one."""
        return [flat._version for flat in self.reducer.sums]

    def drop(self) -> None:
        """Forget the gradients that were delivered while the sum was hidden."""
        self.reducer.forget_unexpected()
        for parameter in self.reducer.parameters:
            parameter.grad = None

    @contextmanager
    def apart(self) -> Iterator[list[Tensor | None]]:
        """Keep the gradients that are delivered in this block out of the sum, which is hidden. The
        list has them afterwards, by number.
        """
        self.drop()
        delivered: list[Tensor | None] = []
        try:
            yield delivered
        finally:
            self.reducer.reached = self.reducer.reached or self.reducer.unexpected
            delivered += [parameter.grad for parameter in self.reducer.parameters]
            self.drop()

    def add_to_next(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of an earlier backward of this micro-batch to those that the next backward
        delivers.
        """
        for number, gradient in enumerate(gradients):
            parameter = self.reducer.parameters[number]
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
                self.reducer.ready[number] = True

    def count_rest(self, gradients: Sequence[Tensor | None]) -> None:
        """Count those of `add_to_next` whose parameters the backward has not reached."""
        for number, gradient in enumerate(gradients):
            parameter = self.reducer.parameters[number]
            if gradient is not None and parameter.grad is gradient:
                self.reducer.gradient_ready(number, parameter)
