"""Whether a data set draws from the host's generators: seeding costs microseconds, and most samples
draw nothing.

A generator's state can be looked at cheaply (host_generators.py). So nothing is seeded until a look
shows that something was drawn; the fetch is then undone and made again under its own stream, and
from then on that generator is always seeded. What a fetch returns never depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from lockstep.runtime.host_generators import Generator, Numpy, Random, Torch

Made = TypeVar("Made")
Enter = Callable[[int], None]
Looks = list[tuple[Generator, Any]]


class Streams:
    """Makes things under random streams of their own.

    With `keep` the process's own states are left as they were; a loader worker, where nobody else
    draws, can do without.
    """

    def __init__(self, *, keep: bool) -> None:
        self._generators: list[Generator] = [Torch(), Numpy(), Random()]
        self._drawn: list[Generator] = []
        self._keep = keep
        self._last: Looks | None = None  # before what was made last, if nothing was drawn

    def make(self, make: Callable[[Enter | None], Made]) -> Made:
        """What `make(enter)` returns, which calls `enter(seed)` before whatever has a stream of its
        own; None: nothing is to be seeded.

        It is called again, from the same states, where it drew from a generator that nothing had
        drawn from until then.
        """
        if self._drawn:
            return self._seeded(make, self._looks())
        looks = self._last or self._looks()
        for generator, look in looks:
            if generator.hidden(look):
                return self._seeded(make, looks)
        self._last = None
        try:
            made = make(None)
        except Exception:
            if not self._moved(looks):
                raise
        else:
            if not self._moved(looks):
                self._last = None if self._keep else looks
                return made
        self._surprised(looks, ())
        return self._seeded(make, looks)

    def _looks(self) -> Looks:
        """At every generator; without `keep`, only at those that may still surprise."""
        return [
            (generator, generator.look())
            for generator in self._generators
            if self._keep or generator not in self._drawn
        ]

    @staticmethod
    def _moved(looks: Looks) -> bool:
        # a list: a generator takes as long as what it yields
        return any([generator.drawn(look) for generator, look in looks])

    def _seeded(self, make: Callable[[Enter | None], Made], looks: Looks) -> Made:
        seeded = self._drawn + [
            generator
            for generator, look in looks
            if generator not in self._drawn and generator.hidden(look)
        ]
        while True:
            surprised: list[Generator] = []
            try:
                made = make(_seeding(seeded))
            except Exception:
                surprised = self._surprised(looks, seeded)
                if not surprised:
                    raise
            else:
                surprised = self._surprised(looks, seeded)
                if not surprised:
                    return made
            finally:
                for generator, look in looks:
                    if generator in seeded:
                        generator.put_back(look)
            seeded = seeded + surprised

    def _surprised(self, looks: Looks, seeded: Collection[Generator]) -> list[Generator]:
        """Those that were drawn from without a seed: put back, and seeded from now on."""
        moved = [
            (generator, look)
            for generator, look in looks
            if generator not in seeded and generator.drawn(look)
        ]
        for generator, look in moved:
            generator.put_back(look)
        self._drawn += [generator for generator, _ in moved if generator not in self._drawn]
        return [generator for generator, _ in moved]


def _seeding(generators: list[Generator]) -> Enter | None:
    if not generators:
        return None

    def enter(value: int) -> None:
        for generator in generators:
            generator.seed(value)

    return enter
