"""How many gradients each parameter gets in a backward, where every backward is like the first one."""

from __future__ import annotations


class StaticGraph:
    """Learns from the first backward which gradient of a parameter is its last. A graph that is not static has one of each."""

    def __init__(self) -> None:
        self.on = False
        self._times: list[int] | None = None
        self._count: list[int] = []

    def begin(self, parameters: int) -> None:
        """A backward is about to begin."""
        self._count = [0] * parameters

    def is_last(self, number: int) -> bool:
        """Count a gradient of a parameter; whether it gets no further one. In the first backward nobody knows."""
        self._count[number] += 1
        return not self.on or (self._times is not None and self._count[number] >= self._times[number])

    def has_all(self, number: int) -> bool:
        """Whether a further gradient of a parameter would be one more than in the first backward."""
        return self.on and self._times is not None and self._count[number] == self._times[number]

    def learn(self) -> None:
        """A backward has ended."""
        if self.on and self._times is None:
            self._times = self._count

    def forget(self) -> None:
        """The model has other parameters."""
        self._times = None

    def changed(self, number: int, name: str) -> str | None:
        """What to say of one gradient more; None where the graph is not known to be static."""
        if not self.on or self._times is None:
            return None
        return (
            f"Your training graph has changed in this iteration, and static_graph=True says that it does not: {name!r} got gradient "
            f"{self._count[number] + 1}, and {self._times[number]} in the first backward. Leave out static_graph"
        )
