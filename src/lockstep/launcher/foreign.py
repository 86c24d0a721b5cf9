"""A command that torchrun, srun, mpirun or a cluster has started once for each rank: it is a rank,
and starts none.

There is no launcher of ours then that would say in the end what went wrong. Every rank says it for
itself: its own failure in full, and in one line what is only the consequence of another rank's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import ending, failures
from lockstep.runtime import status
from lockstep.runtime.environment import Placement, started_by_others


def rank_here(workers: str | int | None) -> Placement | None:
    """This process's place if another launcher has started it as one of several ranks; `workers` is
    what the command was asked for.

    Raises UsageError where another number was asked for, and in a shell of a job whose tasks nobody
    has started, unless a number was asked for.
    """
    try:
        place = started_by_others(os.environ)
    except UsageError:
        if workers is not None:  # then this command starts them
            return None
        raise
    if place is not None and workers is not None and str(workers) != str(place.size):
        sizes = place.source.split(" and ")[1]
        raise UsageError(
            "workers-differ-from-launcher",
            workers=workers,
            size_name=sizes,
            size=place.size,
            rank=place.rank,
        )
    return place


def refuse_watching(place: Placement, asked: bool) -> None:
    """Options of a launcher of ours, which starts its ranks and watches them. Raises UsageError
    where one was given.
    """
    if asked:
        raise UsageError(
            "options-of-a-launcher", source=place.source, rank=place.rank, size=place.size
        )


def work_as(place: Placement, work: Callable[[], object], *, may_exit: bool = True) -> None:
    """Do the rank's work. Where it fails the process says so and ends at once, with the exit code
    that `lockstep run` would pass on.

    `may_exit`: the work is the user's own program, which may end with sys.exit(0).
    """
    terminal = os.dup(2)  # the work may send stderr elsewhere
    try:
        work()
    except BaseException as error:
        failure = failures.of_exception(error, place.rank)
        if failure.code == ExitCode.OK and not may_exit and type(error) is SystemExit:
            failure = failures.of_exit_inside(error, place.rank)
        if failure.code == ExitCode.OK:
            ending.announce_to_terminal(place.rank)
            raise
        with suppress(OSError):
            os.write(terminal, said(failure).encode())
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(failure.code)  # threads of a communication library must not keep it
    else:
        ending.note_groups()
        if place.rank == 0 and place.size > 1 and not status.was_opened():
            os.write(terminal, f"{ending.never_joined(place.size)}\n".encode())
        ending.announce_to_terminal(place.rank)
    finally:
        os.close(terminal)


def said(failure: failures.Failure) -> str:
    """What a rank has to say of its end: nothing where it was told to exit, and has said why."""
    if failure.kind == "exit" and not failure.message:
        return ""
    if failure.kind == "usage":
        return (
            f"error (rank {failure.rank}): {failure.message}\n"
            if failure.rank
            else f"{failures.render(failure)}\n"
        )
    if failure.standing == "consequence":
        return f"{failures.summary(failure)}\n"
    return f"{failures.render(failure)}\n"
