"""One epoch of a Loader: its windows in order, each with the micro-batches of its step that are
this rank's, or that it draws where a server deals them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.data.window_loader import Position
from lockstep.data.windows import Cut, Plan, Window

if TYPE_CHECKING:
    from lockstep.data.loader import Loader


@dataclass(frozen=True, slots=True)
class Drawn:
    """What this rank does next: `slots` of the step at `place` in its epoch. Or, without slots, it
    meets the others.

    Then all steps before `place` are done, and `over` says whether the epoch is.
    """

    place: int
    slots: range
    over: bool = False


class Draws(Protocol):
    """Who deals out the slots. Every rank walks the same epochs, each with as many windows as it
    gets.
    """

    def draw(self, epoch: int, first: int, begin: int, plan: Plan) -> Drawn:
        """The next of an epoch that begins with the step number `first` over all epochs, and of
        which this run does those from `begin` on.
        """
        ...


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
        return self._loader.batch_plan.plan(self.number).steps_per_epoch

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
        loader, balancer, walk = self._loader, self._loader.balancer, None
        rank, size, (plan, first) = loader.rank, loader.size, self._plan
        if balancer is not None:
            balancer.leave()
        for place in range(self.begin, steps):
            moved = None if balancer is None else balancer.begin()
            cut = plan.at(place, self.number, first + place, loader.by_rank)
            if walk is None or moved is not None:
                walk = loader._walk_of(self.number, range(place, steps), cut.share(rank, size))
            window = self._window(cut, walk.take)
            window.balancer, window.moved = balancer, moved
            if walk.ahead:
                count = len(window)
                if place + 1 < steps:
                    following = plan.at(place + 1, 0, 0, cut.by_rank)
                    count += len(following.filled(rank, size))
                walk.fetch_ahead(count)
            loader._hand_out(self.number, place, steps)
            yield window
            window.drain()

    def _drawn(self, draws: Draws) -> Iterator[Window]:
        """Windows of the slots that this rank draws, as many as it gets; and an empty one
        wherever all ranks meet, the last at the epoch's end.
        """
        loader, drawn = self._loader, Drawn(self.begin, range(0))
        plan, first = self._plan
        while not drawn.over:
            drawn = draws.draw(self.number, first, self.begin, plan)
            place = drawn.place if drawn.slots else max(0, drawn.place - 1)
            cut = plan.at(place, self.number, first + place)
            if drawn.slots:
                walk = loader._walk_of(self.number, range(place, place + 1), drawn.slots)
                window = self._window(cut, walk.take, drawn.slots)
                if walk.ahead:
                    walk.fetch_ahead(len(window))
            else:
                window = self._window(cut, tuple, drawn.slots)
                begins = (self.number + 1, 0) if drawn.over else (self.number, drawn.place)
                loader._position, loader._loaded = Position(*begins), False
            yield window
            window.drain()

    @property
    def _plan(self) -> tuple[Plan, int]:
        """And the number of the epoch's first step, counted over all epochs."""
        batch_plan = self._loader.batch_plan
        return batch_plan.plan(self.number), batch_plan.first(self.number)

    def _window(self, cut: Cut, take: Callable[[], Any], drawn: range | None = None) -> Window:
        loader = self._loader
        counts = partial(loader.batch_plan.counts, cut)
        window = Window(cut, loader.rank, loader.size, take, counts, loader.recipe, drawn)
        window.read = loader._read
        return window
