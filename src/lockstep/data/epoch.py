"""One epoch of a Loader: its windows in order, each with the micro-batches of its step that are
this rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from lockstep.data.draws import Drawn, Draws
from lockstep.data.position import Position
from lockstep.data.windows import Window

if TYPE_CHECKING:
    from lockstep.data.loader import Loader


class Epoch:
    """Iterating yields its windows in order; `len` is the number of its steps, the same on all
    ranks.

    A resumed epoch yields the windows from its step `begin` on; its length stays.
    """

    def __init__(self, loader: Loader, number: int, begin: int = 0) -> None:
        self.number = number
        self.begin = begin
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.course.plan(self.number).steps_per_epoch

    def __repr__(self) -> str:
        return f"Epoch({self.number}, {len(self)} steps)"

    def __iter__(self) -> Iterator[Window]:
        """Yield every step's Window, empty ones too. What a loop leaves of a window is fetched
        before the next one.
        """
        loader = self._loader
        steps = len(self)
        loader._position = Position(self.number, self.begin)
        yield from self._shared(steps) if loader.draws is None else self._drawn(loader.draws)

    def _shared(self, steps: int) -> Iterator[Window]:
        """Windows of this rank's shares. Where these move, what was fetched ahead is of other
        slots: a walk ends, and another begins there.
        """
        loader, course = self._loader, self._loader.course
        rank, size, recipe, balancer = loader.rank, loader.size, loader.recipe, loader.balancer
        plan, walk = course.plan(self.number), None
        if balancer is not None:
            balancer.leave()
        for place, cut in enumerate(
            plan.cuts(self.number, self.begin, course.first(self.number)), self.begin
        ):
            moved = None if balancer is None else balancer.begin()
            cut = cut._replace(by_rank=loader.by_rank)
            if walk is None or moved is not None:
                walk = loader._walk(self.number, range(place, steps), cut.share(rank, size))
            window = Window(cut, rank, size, walk.take, partial(course.counts, cut), recipe)
            window.balancer, window.moved = balancer, moved
            if walk.ahead:
                following = (
                    plan.at(place + 1, self.number, cut.step + 1)._replace(by_rank=cut.by_rank)
                    if place + 1 < steps
                    else None
                )
                walk.fetch_ahead(
                    len(window) + (0 if following is None else len(following.filled(rank, size)))
                )
            loader._hand_out(self.number, place, steps)
            yield window
            window.drain()

    def _drawn(self, draws: Draws) -> Iterator[Window]:
        """Windows of the slots that this rank draws, as many as it gets; and an empty one
        wherever all ranks meet, the last at the epoch's end.
        """
        loader, course = self._loader, self._loader.course
        plan, first = course.plan(self.number), course.first(self.number)
        recipe, drawn = loader.recipe, Drawn(self.begin, range(0))
        while not drawn.over:
            drawn = draws.draw(self.number, first, self.begin, plan)
            place = drawn.place if drawn.slots else max(0, drawn.place - 1)
            cut = plan.at(place, self.number, first + place)
            if drawn.slots:
                walk = loader._walk(self.number, range(place, place + 1), drawn.slots)
                window = Window(
                    cut,
                    loader.rank,
                    loader.size,
                    walk.take,
                    partial(course.counts, cut),
                    recipe,
                    drawn.slots,
                )
                if walk.ahead:
                    walk.fetch_ahead(len(window))
            else:
                window = Window(cut, loader.rank, loader.size, tuple, None, recipe, drawn.slots)
                loader._position = (
                    Position(self.number, drawn.place)
                    if not drawn.over
                    else Position(self.number + 1, 0)
                )
                loader._loaded = False
            yield window
            window.drain()
