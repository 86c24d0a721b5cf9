"""The child's side of `lockstep.launch`: become a rank, run the function, send back what came of it, leave.

A rank leaves by `os._exit`, after its exit handlers: threads of a communication library that are still alive would abort an
ordinary exit, and a rank that has sent its answer has nothing more to lose.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lockstep.errors import UsageError
from lockstep.launcher import ending, failures, logs
from lockstep.orphans import die_with_maker, die_with_parent

UNGUARDED = 78
"""Exit code of a rank whose script launches ranks again as it is imported."""


class Payload:
    """A function and its arguments on their way to a rank. Tensors are copied: ranks must not share a model by accident."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | bytes = (fn, args, kwargs)

    def __getstate__(self) -> bytes:
        """Called while a process is being started, which is when queues and locks among the arguments can be handed over."""
        buffer = io.BytesIO()
        _Copying(buffer, pickle.HIGHEST_PROTOCOL).dump(self._call)
        return buffer.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self._call = state

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """In the rank: import the function and rebuild the arguments."""
        assert isinstance(self._call, bytes)
        fn, args, kwargs = pickle.loads(self._call)
        return fn, args, kwargs


class _Copying(ForkingPickler):
    """A pickler that can hand over queues and locks, and copies tensors where torch would share their memory."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What a rank must know before it begins."""

    rank: int
    size: int
    port: int
    parent: int
    by_server: bool
    """Started by a fork server: the process to outlive nobody for is then not the parent."""
    environment: Mapping[str, str]
    start_method: str | None
    """How the caller starts processes, if it has said. A rank's own, loader workers above all, start in the same way."""

    def take(self) -> None:
        """Take the caller's environment and the place among the ranks. A session of its own: Ctrl-C goes to the launcher alone."""
        if self.by_server or sys.platform != "linux":
            die_with_maker()
        else:
            die_with_parent(self.parent)
        with suppress(PermissionError):
            os.setsid()
        multiprocessing.set_start_method(self.start_method, force=True)  # multiprocessing hands down what started this process
        os.environ.clear()
        os.environ.update(self.environment)
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(self.size),
            LOCAL_WORLD_SIZE=str(self.size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )


def main(seat: Seat, payload: Payload, pipe: Connection) -> None:
    """Be rank `seat.rank`: send ("result", bytes) or ("failure", Failure) through `pipe`, then end this process."""
    code = 0
    try:
        seat.take()
        logs.whole_lines()
        pipe.send(("started", None))
        fn, args, kwargs = payload.open()
        answer = fn(*args, **kwargs)
        _close_world()
        pipe.send(("result", _portable(answer, seat.rank)))
        ending.announce_to_terminal(seat.rank)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemon threads, as Python does
        atexit._run_exitfuncs()
    except BaseException as error:
        failure = failures.of_exception(error, seat.rank)
        code = failure.code or 1
        pipe.send(("failure", failure))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _portable(answer: object, rank: int) -> bytes:
    try:
        return pickle.dumps(answer)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"rank {rank} returned a {type(answer).__name__}, which cannot be sent back ({error}); return tensors, numbers, text or containers of them"
        ) from None


def _close_world() -> None:
    """Close what the function left open. Looked up, not imported: this room lies below `lockstep.world`."""
    worlds = sys.modules.get("lockstep.world")
    if worlds is not None:
        worlds.World.close_open()
