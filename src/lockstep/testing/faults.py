"""Inject faults: make a rank fail, exit, die, stop, hang or slow down at a given step and phase, to
test how the run reports it.

    # anywhere in the script, on all ranks alike
    lockstep.testing.kill_at(rank=1, step=3, phase="backward")

`step` is the optimizer step that is being computed, from 1. `phase` is one of start, data, forward,
backward, reduce, optimizer, checkpoint, evaluate, loop (the user's code between steps). A fault
strikes once, when the phase begins, on the rank's main thread (slow_at: every time from then on).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.config.knob import chosen, number, whole
from lockstep.runtime import status
from lockstep.runtime.environment import placement
from lockstep.runtime.step_clock import PHASES


@dataclass(slots=True)
class _Fault:
    rank: int
    step: int
    phase: str
    strike: Callable[[], None]
    lasting: bool
    struck: bool = False


_faults: list[_Fault] = []


def fail_at(rank: int, step: int, phase: str, error: Exception | None = None) -> None:
    """Make a rank raise an exception.

    Call it on all ranks alike, before the step. The fault strikes once, on the rank's main thread,
    when the phase begins.

    Example::

        lockstep.testing.fail_at(rank=1, step=3, phase="backward")

    Args:
        rank: the rank that fails.
        step: the optimizer step that is being computed, from 1.
        phase: the phase at whose start it fails: start, data, forward, backward, reduce, optimizer,
            checkpoint, evaluate, or loop (your code between steps).
        error: the exception to raise. Default: a RuntimeError that names rank, step and phase.
    """

    def strike() -> None:
        raise error or RuntimeError(f"a fault on purpose: rank {rank}, step {step}, {phase}")

    _add(rank, step, phase, strike)


def exit_at(rank: int, step: int, phase: str, code: int = 0) -> None:
    """Make a rank exit at once, without a message.

    Args:
        rank, step, phase: as for `fail_at`.
        code: the exit code.
    """
    _add(rank, step, phase, lambda: os._exit(code))


def kill_at(rank: int, step: int, phase: str, number: int = signal.SIGKILL) -> None:
    """Make a rank kill itself with a signal.

    Args:
        rank, step, phase: as for `fail_at`.
        number: the number of the signal. Default: SIGKILL.
    """
    _add(rank, step, phase, lambda: os.kill(os.getpid(), number))


def stop_at(rank: int, step: int, phase: str) -> None:
    """Stop a rank with SIGSTOP, as a debugger does.

    Args:
        rank, step, phase: as for `fail_at`.
    """
    _add(rank, step, phase, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def hang_at(rank: int, step: int, phase: str, *, busy: bool = False) -> None:
    """Make a rank sleep forever.

    Args:
        rank, step, phase: as for `fail_at`.
        busy: loop forever instead of sleeping.
    """

    def strike() -> None:
        while True:
            if not busy:
                time.sleep(3600)

    _add(rank, step, phase, strike)


def hold_gil_at(rank: int, step: int, phase: str) -> None:
    """Make a rank sleep forever in C, so that no other thread of its process can run Python.

    Args:
        rank, step, phase: as for `fail_at`.
    """

    def strike() -> None:
        while True:
            ctypes.PyDLL(None).sleep(3600)

    _add(rank, step, phase, strike)


def slow_at(rank: int, step: int, phase: str, seconds: float) -> None:
    """Slow a rank down: it sleeps each time the phase begins, from that step on.

    Args:
        rank, step, phase: as for `fail_at`.
        seconds: seconds to sleep each time.
    """
    number("seconds", seconds, above=0)
    _add(rank, step, phase, lambda: time.sleep(seconds), lasting=True)


def no_faults() -> None:
    """Remove all faults that were set."""
    _faults.clear()
    status.on_phase(None)


def _add(
    rank: int, step: int, phase: str, strike: Callable[[], None], lasting: bool = False
) -> None:
    chosen("phase", phase, PHASES)
    whole("rank", rank, 0)
    whole("step", step, 0)
    _faults.append(_Fault(rank, step, phase, strike, lasting))
    status.on_phase(_strike_due)


def _strike_due(step: int, phase: str) -> None:
    for fault in _faults:
        due = step == fault.step or (fault.lasting and step > fault.step)
        if due and fault.phase == phase and not fault.struck:
            own = placement(os.environ)
            if fault.rank == (0 if own is None else own.rank):
                fault.struck = not fault.lasting
                fault.strike()
