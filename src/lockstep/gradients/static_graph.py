"""How many gradients each parameter gets in a backward, if all backwards are alike."""

from __future__ import annotations

from lockstep.errors import LateGradient


class StaticGraph:
    """Counts the gradients of each parameter, if it is `on`. The first backward shows which
    gradient of a parameter is its last. In a graph that is not static, each parameter gets one.
    """

    def __init__(self) -> None:
        self.on = False
        self._expected: list[int] | None = None  # None during the first backward
        self._count: list[int] = []

    def begin(self, parameters: int) -> None:
        """Prepare for a backward."""
        self._count = [0] * parameters

    def is_last(self, number: int) -> bool:
        """Count a gradient of a parameter. Return whether it is the last one: False during the
        first backward, when this is not known yet.
        """
        self._count[number] += 1
        return self._expected is not None and self._count[number] >= self._expected[number]

    def has_all(self, number: int) -> bool:
        """Whether a parameter has had as many gradients as in the first backward."""
        return self._expected is not None and self._count[number] == self._expected[number]

    def learn(self) -> None:
        """Keep the counts of the first backward, which has ended."""
        if self._expected is None:
            self._expected = self._count

    def forget(self) -> None:
        """Drop the counts: the model has other parameters."""
        self._expected = None

    def late(self, number: int, name: str) -> LateGradient:
        """Return the error for a gradient that comes after a parameter's last one."""
        if not self.on or self._expected is None:
            return LateGradient("late-gradient", parameter=name)
        count, times = self._count[number] + 1, self._expected[number]
        return LateGradient("static-graph-changed", parameter=name, count=count, times=times)
