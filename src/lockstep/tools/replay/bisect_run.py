"""Find the first step of a run that cannot be computed again. The run is computed from each checkpoint
to the next, so that what goes wrong in one part is not carried into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.runs import CheckpointRecord, Run
from lockstep.tools.replay.computed import Detail
from lockstep.tools.replay.steps import Comparison, ReplayPlan, compare, compute, plan_of

_CHANGES = ("resumed", "changed", "moved")  # events after which a run may go on differently


@dataclass(frozen=True, kw_only=True, slots=True)
class Irreproducible:
    """The first step whose recorded numbers cannot be computed again."""

    step: int
    plan: ReplayPlan
    loss: Comparison | None
    """None: all losses agree, and the weights of the checkpoint after `step` do not."""
    parameter: str | None = None
    """The first tensor of that checkpoint that differs."""
    events: Sequence[str]
    """What the run has recorded between the checkpoint before and this step."""


def first_irreproducible(
    run: Run,
    first: int,
    last: int,
    *,
    workers: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    say: Callable[[str], None],
) -> Irreproducible | None:
    """Compute the steps from `first` to `last` again, and return the first one that differs from
    the record. None: all agree.

    Args:
        run, workers, device: as for `plan_of`.
        first, last: steps, from 1. The checkpoint before `first` is where it begins.
        say: called with a line for each part.
    """
    begin = first
    while begin <= last:
        following = _checkpoint_after(run, begin)
        end = last if following is None else min(last, following.step)
        plan = plan_of(run, begin, end, workers=workers, device=device)
        compared = None
        if following is not None and following.step == end and plan.settings.exact:
            compared = following.path
        computed = compute(plan, Detail(first=end + 1, last=end), compared)
        for step in computed.steps:
            loss = compare(plan, step)
            if loss is not None and not loss.reproduced:
                events = _events(run, plan.begin, step.step)
                return Irreproducible(step=step.step, plan=plan, loss=loss, events=events)
        if computed.differing is not None:
            return Irreproducible(
                step=end,
                plan=plan,
                loss=None,
                parameter=computed.differing,
                events=_events(run, plan.begin, end),
            )
        say(f"{in_words(run, plan.begin + 1, end)} can be reproduced")
        begin = end + 1
    return None


def in_words(run: Run, first: int, last: int) -> str:
    """Name steps, and say how many of them `--skip` left out."""
    left_out = sum(run.step(step) is None for step in range(first, last + 1))
    return f"steps {first} to {last}" + (f" ({left_out} were left out)" if left_out else "")


def _checkpoint_after(run: Run, step: int) -> CheckpointRecord | None:
    """Return the first checkpoint that was saved after `step` or a later one."""
    for checkpoint in run.checkpoints:
        if checkpoint.model == 1 and checkpoint.step >= step:
            return checkpoint
    return None


def _events(run: Run, after: int, until: int) -> list[str]:
    lines = []
    for event in run.events:
        if event.step is not None and event.event in _CHANGES and after <= event.step <= until:
            lines.append(event.line or event.event)
    return lines
