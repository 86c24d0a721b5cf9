"""One node: a process that starts and watches the node's ranks as `lockstep run` does on one host,
when the driver tells it to.

    driver --Ray--> actor --pipe--> this process --fork server--> ranks

It is the actor's child process, and not one of its threads. Only the main thread of a process can
handle its signals, and a process of its own is free of what Ray sets in its workers. When the actor
dies, for example with its raylet, the pipe ends, and this process and its ranks with it.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from lockstep.errors import ExitCode, UsageError
from lockstep.launcher.engine import LocalRanks, store
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.ray.actor import Job
from lockstep.launcher.stalls_of_nodes import OtherNodes
from lockstep.launcher.start import FOR_SCRIPTS, FOR_TRAININGS, fork_server
from lockstep.launcher.supervise import Outcome, Share, supervise
from lockstep.runtime.failure_record import of_exception
from lockstep.runtime.interfaces import gloo_and_nccl


class _Orders:
    """The driver's orders, read by a thread. Orders about running ranks act at once; the others
    wait for `next`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._waiting: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._other_nodes = OtherNodes(self.send)
        self._called_off = False
        threading.Thread(target=self._read, name="lockstep-orders", daemon=True).start()

    def send(self, kind: str, content: object) -> None:
        with self._sending:
            self._connection.send((kind, content))

    def next(self) -> tuple[str, object]:
        return self._waiting.get()

    def share(self, ranks: LocalRanks) -> Share:
        """Return the `Share` of new ranks, which are not called off."""
        return Share(
            ranks=ranks,
            called_off=lambda: self._called_off,
            elsewhere=self._other_nodes if ranks.nodes > 1 else None,
        )

    def _read(self) -> None:
        while True:
            try:
                kind, content = self._connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the ranks die with the fork server, and it dies with this process
            if kind == "stop":
                self._called_off = True
            elif kind == "stall":
                self._other_nodes.note(content)
            elif kind == "signal":
                os.kill(os.getpid(), content)
            else:
                if kind == "start":
                    self._called_off = False
                    self._other_nodes = OtherNodes(self.send)
                self._waiting.put((kind, content))


def main(descriptor: int, address: str) -> None:
    """Follow the driver's orders until it says "end", or the pipe ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        # while there are no ranks, the driver's signals have no effect
        signal.signal(number, lambda *_: None)
    connection = Connection(descriptor)
    job: Job = connection.recv()
    orders = _Orders(connection)
    stores = ExitStack()
    environment = {**gloo_and_nccl(address, os.environ), **job.environment}
    if job.folder:
        os.chdir(job.folder)
    if job.call is not None:
        os.environ.update(environment)
    cold = job.launch.cold or (job.call is not None and job.call.variables is not None)
    modules = FOR_TRAININGS if job.target.ours else FOR_SCRIPTS
    server = fork_server(modules, {**os.environ, **environment}, cold=cold)
    server.ready()
    orders.send("ready", None)
    while True:
        kind, content = orders.next()
        if kind == "end":
            stores.close()
            return
        if kind == "store":
            stores.close()
            orders.send("store", stores.enter_context(store(server, address)))
        else:
            assert isinstance(content, LocalRanks)
            orders.send("ended", _outcome(job, content, environment, orders))


def _outcome(job: Job, ranks: LocalRanks, environment: Variables, orders: _Orders) -> Outcome:
    try:
        if job.call is not None:
            variables = job.call.variables
            results = start_ranks(
                _on_rank,
                ranks.count,
                (job.call.pickled,),
                {},
                timeout=None,
                imports=job.call.imports,
                variables=None if variables is None else variables.__getitem__,
                local_ranks=ranks,
            )
            orders.send("results", results)
            return Outcome(ExitCode.OK)
        if job.mark is not None:
            _check_shared(Path(job.mark[0]), job.mark[1])
        return supervise(
            job.target,
            ranks.count,
            logs=job.logs,
            console=job.console,
            environment=environment,
            heeds=job.heeds,
            launch=job.launch,
            share=orders.share(ranks),
            reports=False,
        )
    except Exception as error:
        # an error of the node itself is reported to the driver like a rank's failure
        failure = of_exception(error, ranks.first_rank)
        if isinstance(error, UsageError):
            failure = replace(failure, user_line="")
        return Outcome(failure.code, failure)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _on_rank(pickled: bytes) -> bytes:
    fn, args = pickle.loads(pickled)
    return pickle.dumps(fn(*args))


def _check_shared(file: Path, mark: str) -> None:
    """Raise UsageError if this node has another folder under the name of the run directory, or
    none.
    """
    if not file.exists() or file.read_text(encoding="utf-8") != mark:
        raise UsageError(
            "run-directory-not-shared", path=str(file.parent), host=socket.gethostname()
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
