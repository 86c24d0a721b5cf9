"""The passes over a window of a step that other ranks compute too (checks/witness.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.checks.witness import Witness, buffers_kept
from lockstep.data.windows import Window
from lockstep.step.window_run import WindowRun
from lockstep.updates.sharded import Sharded

if TYPE_CHECKING:
    from lockstep.step.stepper import Stepper


def witnessed(stepper: Stepper, witness: Witness, run: WindowRun, window: Window) -> Iterator[Any]:
    """Compute another rank's share, then the window as usual, and compare. Raises on all ranks:
    CorruptResult, or UsageError if the user's code is not deterministic.
    """
    witness.at_rest(stepper.steps)
    stepper.check_replicas(f"before step {stepper.steps + 1}")
    yield from _rehearsed(stepper, witness, run, window, witness.begin(window))
    run.record = witness.record(0, stepper.reducer)
    with run.record.kept():
        yield from run.walk(window)
        run.complete()
    if not witness.agree(stepper.steps):
        for turned in witness.again():
            yield from _rehearsed(stepper, witness, run, window, turned)
        raise witness.error()
    if isinstance(stepper.update, Sharded):  # of other updates every rank does all the work
        stepper.update.witness = witness


def local_state(stepper: Stepper) -> list[tuple[str, Tensor]]:
    """Return this rank's weights, buffers, and part of the optimizer's state, with names."""
    names = {id(parameter): name for name, parameter in stepper.model.named_parameters()}
    _, pieces = stepper.update.optimizer.pieces(lambda parameter: names[id(parameter)])
    named = stepper.replicated()
    for piece in pieces:
        named.append((piece.name, piece.data))
    return named


def _rehearsed(
    stepper: Stepper, witness: Witness, run: WindowRun, window: Window, turned: int
) -> Iterator[Any]:
    """Make one more pass, in which rank r computes the share of rank r + `turned`. Only its record
    is kept.
    """
    share = window.turned(turned, stepper.group.rank, stepper.group.size)
    record = witness.record(turned, stepper.reducer)
    with stepper.reducer.rehearsal(), buffers_kept(stepper.model), record.kept():
        again = run.again(share)
        again.record = record
        with stepper.acting_on(again):
            yield from again.walk(share)
            again.complete()
    run.restart()
