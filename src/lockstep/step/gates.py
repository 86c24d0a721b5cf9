"""Schedulers and a GradScaler in a user's own loop: they act at the last micro-batch of a window, and
do nothing before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.step.micro_batch import MicroBatch

if TYPE_CHECKING:
    from lockstep.step.own_loop import Trained


class Schedulers:
    """The schedulers of one optimizer. Those that the loop steps inside its body step once a window;
    the others whenever they are stepped, as after an epoch.

    Args:
        current: returns the micro-batch that the loop computes now; None outside of its body.
    """

    def __init__(self, current: Callable[[], MicroBatch | None]) -> None:
        self.in_body = False
        """Whether the body steps them, on some rank."""
        self._current = current
        self._steps: list[Callable[[], None]] = []
        self._owed = 0  # windows whose last micro-batch was left out before that was known

    def add(self, scheduler: Any) -> None:
        """Have a scheduler step once a window where the body steps it."""
        kind = type(scheduler)
        self._steps.append(lambda: kind.step(scheduler))

        @functools.wraps(kind.step)
        def step(stepped: Any, *args: Any, **options: Any) -> None:
            micro_batch = self._current()
            self.in_body = self.in_body or micro_batch is not None
            if micro_batch is None or micro_batch.last:
                kind.step(stepped, *args, **options)

        # a subclass, because an attribute of the scheduler would be part of its state_dict
        members = {"step": step, "__module__": kind.__module__, "__doc__": kind.__doc__}
        scheduler.__class__ = type(kind.__name__, (kind,), members)

    def left_out(self) -> None:
        """The loop has left out the last micro-batch of a window, and so their step."""
        if self.in_body:
            self._step()
        else:
            self._owed += 1

    def learn(self, in_body: bool) -> None:
        """Learn whether the body steps them on some rank."""
        if in_body and not self.in_body:
            for _ in range(self._owed):
                self._step()
        self.in_body = in_body
        self._owed = 0

    def _step(self) -> None:
        for step in self._steps:
            step()


def gate_scaler(scaler: Any, trained: Sequence[Trained]) -> None:
    """Have a GradScaler act at the last micro-batch. An overflow ends the window without a step.

    Args:
        scaler: torch's.
        trained: the models whose losses it scales.
    """
    unscale, scaled_step, update = scaler.unscale_, scaler.step, scaler.update
    by_optimizer = {id(one.optimizer): one for one in trained}
    for one in trained:
        one.scaler = scaler

    @functools.wraps(unscale)
    def gated_unscale(optimizer: Any) -> None:
        one = by_optimizer.get(id(optimizer))
        if one is None or one.acts:
            unscale(optimizer)

    @functools.wraps(scaled_step)
    def gated_step(optimizer: Any, *args: Any, **options: Any) -> Any:
        one = by_optimizer.get(id(optimizer))
        if one is None:
            return scaled_step(optimizer, *args, **options)
        one.asked = True
        if not one.acts:
            return None
        result = scaled_step(optimizer, *args, **options)
        one.skip()
        return result

    @functools.wraps(update)
    def gated_update(*args: Any, **options: Any) -> None:
        if trained[0].acts:
            update(*args, **options)

    scaler.unscale_, scaler.step, scaler.update = gated_unscale, gated_step, gated_update
