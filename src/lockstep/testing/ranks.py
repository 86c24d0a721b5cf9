"""One helper for every test that needs several ranks. It starts them fast, has a hard timeout, and
shows the failing rank's traceback.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from lockstep.launcher.fork_server import serve
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.start import ALIKE, FOR_TRAININGS, WARM, ForkServer, alike, own_servers
from lockstep.runtime.private import run_directory
from lockstep.runtime.process_lifetime import die_with_parent

if TYPE_CHECKING:
    from lockstep.world.world import World

R = TypeVar("R")

_PRELOADED = ("lockstep.launcher.call", "lockstep.testing.ranks", "lockstep.step.stepper")
# modules that tests often import, and that each rank would import again
_IF_IN_USE = ("pytest", "hypothesis", "numpy", "torch.utils.data")


def run_ranks(
    fn: Callable[Concatenate[World, ...], R],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: timedelta = timedelta(seconds=60),
) -> list[R]:
    """Run `fn(world, *args, **kwargs)` on `workers` gloo ranks of this host.

    Each rank has one intra-op thread, so that results do not depend on the machine. Ranks begin
    with the caller's environment, working directory and sys.path. They are forked from a server
    that has imported torch. The first call waits for that import; later calls take a fraction of a
    second.

    Example::

        def add(world):
            return lockstep.collectives.all_reduce(torch.ones(2)).tolist()

        assert lockstep.testing.run_ranks(add, workers=2) == [[2, 2], [2, 2]]

    Args:
        fn: a function at the top of a module that can be imported.
        workers: the number of ranks.
        args: positional arguments after the world, the same for all ranks.
        kwargs: keyword arguments.
        timeout: for the whole call.

    Returns:
        What `fn` returned, by rank.

    Raises:
        WorkerFailed: a rank failed; `rank` is the first one, and the message has its traceback. The
            others have been killed.
        LaunchTimeout: ranks were still running at `timeout`. They have been killed.
    """
    imports = [*_PRELOADED, *(name for name in _IF_IN_USE if name in sys.modules)]
    return start_ranks(
        _with_world, workers, (fn, *args), kwargs or {}, timeout=timeout, imports=imports
    )


def _with_world(fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    import torch

    from lockstep.world.world import init

    with init(backend="gloo") as world:
        torch.set_num_threads(1)
        return fn(world, *args, **kwargs)


@contextmanager
def warm_commands(imports: Sequence[str] = ()) -> Iterator[None]:
    """Let this process, and `lockstep` commands that it starts, fork ranks from one warm server.

    Use it in test suites that run commands: their ranks need not import torch and Lockstep again.
    They have this process's umask, limits, niceness and signals. A command starts its own server if
    it has other Python flags, or another value of a variable that acts while a library is imported
    (such as OMP_NUM_THREADS).

    Args:
        imports: further modules for the server to import, beside those of a training.
    """
    with (
        run_directory() as directory,
        closing(ForkServer.start((*FOR_TRAININGS, *imports), os.environ)) as warm,
    ):
        _, listening = warm.ask(_ServeCommands(str(directory / "warm")))
        with listening:
            listening.readline()
        before = {name: os.environ.get(name) for name in (WARM, ALIKE)}
        os.environ.update({WARM: str(directory / "warm"), ALIKE: alike(os.environ)})
        try:
            with own_servers():  # they are forks of this one, and would end a moment after it
                yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


@dataclass(frozen=True, slots=True)
class _ServeCommands:
    """Runs in a process that forks a fork server for each launcher that connects to the Unix socket
    at `path`.
    """

    path: str

    def __call__(self, descriptor: int) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # its ended children are not waited for
        parent = os.getpid()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            os.write(descriptor, b"\n")
            os.close(descriptor)
            while True:
                control, _ = listener.accept()
                if os.fork() == 0:
                    break
                control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        die_with_parent(parent)
        with suppress(OSError):  # the launcher has gone
            control.sendall(str(os.getpid()).encode())
        serve(control)()
