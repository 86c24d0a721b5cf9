"""One rank's part: the steps of its team's world, timed when it is the team's turn.

A turn takes one step that is not timed, in which caches fill again and what loader workers fetched
in others' turns is used up, then the timed steps in a row. A GPU is waited for at both borders, and
all ranks begin together; the slowest rank's time counts. Before the first turn that counts, every
piece of work has a turn of its own to warm up: buckets follow the first backward, kernels are
chosen, replicas compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from lockstep.config.settings import Settings
from lockstep.config.task import Task
from lockstep.data.windows import ENDLESS
from lockstep.step.forward import matmul_precision
from lockstep.step.step_result import StepResult
from lockstep.tools.bench.scaling.prediction import Carried, carried, link_of
from lockstep.tools.bench.scaling.teams import TeamTurns
from lockstep.tools.bench.scaling.works import TimedWork, order_of_turns
from lockstep.tools.timing.in_turns import Trial, take_turns
from lockstep.training.build import loader_of
from lockstep.training.loop import Training
from lockstep.training.opening import backend_of, computing, intra_op_threads
from lockstep.world.world import init

WARM_UP = 3  # steps
_HELD = 4  # windows that are gone round in where loading is not timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """What the first rank of a team has to say."""

    turns: dict[int, list[tuple[int, float]]]
    """By number of the work: samples, of all ranks, and seconds of every turn that counts."""
    carried: Carried


def on_rank(
    turns: TeamTurns,
    source: Callable[[], Task],
    settings: Settings,
    works: Sequence[TimedWork],
    steps: int,
    rounds: int,
    loading: bool,
    links: int | None,
) -> Timed:
    """Called on every rank of every team with the same arguments. `links`: the size of the team
    that measures the link between ranks.
    """
    task = source()
    with init(backend=backend_of(settings.device)) as world, computing(settings, world):
        mine = [number for number, work in enumerate(works) if work.workers == world.size]
        first = replace(task, global_batch=works[mine[0]].global_batch)
        training = Trial(first, replace(settings, workers=world.size), world).training
        link = None
        with matmul_precision(training.precision):
            ready = {
                number: _Steps(works[number], task, training, loading=loading) for number in mine
            }
            found: dict[int, list[tuple[int, float]]] = {number: [] for number in mine}
            turns.ready()
            order = order_of_turns(len(works), rounds)
            for turn, number in enumerate(order):
                if number not in mine:
                    continue
                with turns.turn(turn):
                    if turn >= len(works):
                        found[number].append(ready[number].timed(steps))
                        continue
                    ready[number].timed(WARM_UP - 1)
                    if world.size == links:
                        link = link_of(world, training.stepper.reducer.reduction)
            turns.wait_for(len(order))
        for each in ready.values():
            each.close()
        return Timed(turns=found, carried=carried(training, link))


class _Steps:
    """The steps of one work, on this rank: of the team's one model, with a Loader of their own."""

    def __init__(self, work: TimedWork, task: Task, training: Training, *, loading: bool) -> None:
        self._work, self._training, self._world = work, training, training.world
        own = replace(task, global_batch=work.global_batch)
        self._loader = loader_of(own, self._world, training.settings.loader_workers, drop_last=True)
        self._windows = self._walk() if loading else self._held()

    def _walk(self) -> Iterator[Any]:
        for epoch in self._loader.epochs(ENDLESS):
            yield from epoch

    def _held(self) -> Iterator[Any]:
        windows = list(islice(self._walk(), _HELD))
        for window in windows:
            list(window)  # fetched, and kept
        return cycle(windows)

    def timed(self, steps: int) -> tuple[int, float]:
        """Samples and seconds of so many steps, after one that is not timed; the same on all
        ranks.
        """
        results: list[StepResult] = []
        ways = {"step": lambda: results.append(self._training.step(next(self._windows)))}
        with intra_op_threads(self._work.threads):
            seconds = take_turns(ways, 1, self._world, warm_up=0, steady=steps)["step"][0]
        samples = sum(sum(result.samples_by_rank) for result in results[1:])
        return samples, steps * seconds

    def close(self) -> None:
        self._loader.close()
