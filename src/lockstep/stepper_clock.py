"""A Stepper's clock: it times the steps, and keeps of the latest one that is known what the others are told in the next step's facts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep import status
from lockstep.gradients.facts import FactsMessage
from lockstep.step_clock import StepClock, StepTimes


class StepperClock:
    """`per_micro_batch`: seconds that one took on this rank, loading included; 0 where it walked none."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None  # in which the model computes
        self._device = device
        self.running = StepClock(self._mark if device.type == "cuda" else None)
        self.keeps_spans: Callable[[int], bool] = lambda step: False
        """Of which steps, by number, it shall be kept when each piece of them began and ended."""
        self.per_micro_batch = 0.0
        self._latest: StepTimes | None = None
        self._walked: dict[int, int] = {}  # micro-batches of the steps whose times are not known yet

    def open(self) -> None:
        """A window begins: from now on phases are this training's."""
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        status.open_clock(self.running)

    def _mark(self) -> torch.cuda.Event:
        """In the model's stream, whichever is the current one: that something waits in another one does not hold the model up."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def tell(self, facts: FactsMessage) -> None:
        if self._latest is not None:
            facts.add_times(self._latest.busy, self._latest.waits, self.per_micro_batch)

    def end(self, step: int, micro_batches: int, hidden: float | None) -> tuple[StepTimes, ...]:
        """Step `step` has ended, which walked so many; gives the steps whose times are known since. `hidden`: as in `StepTimes`."""
        self.running.end(step, hidden, spans=self.keeps_spans(step + 1))
        self._walked[step] = micro_batches
        found = tuple(self.running.finished())
        for times in found:
            walked = self._walked[times.step]
            self._latest, self.per_micro_batch = times, (times.data + times.busy) / walked if walked else 0.0
        if found:
            self._walked = {number: count for number, count in self._walked.items() if number > found[-1].step}
        return found
