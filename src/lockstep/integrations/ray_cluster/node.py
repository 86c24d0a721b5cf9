"""The actor of a node: it starts and watches the node's ranks as `lockstep run` does on one host,
when the driver tells it to.

    driver --Ray--> actor --fork server--> ranks

Ray calls the actor's methods in threads of their own; another thread follows the driver's orders.
What the ranks and the actor print goes to the driver. When the actor dies, for example with its
raylet, the fork server and the ranks end with it.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lockstep.errors import ExitCode, UsageError
from lockstep.integrations.ray_cluster.job import Job, NodeFacts, digest, versions
from lockstep.launcher.engine import LocalRanks, store
from lockstep.launcher.fork_server import Variables
from lockstep.launcher.launch import start_ranks
from lockstep.launcher.stalls_of_nodes import OtherNodes
from lockstep.launcher.start import FOR_SCRIPTS, FOR_TRAININGS, fork_server
from lockstep.launcher.stop import Stop
from lockstep.launcher.supervise import Outcome, Share, supervise
from lockstep.runtime.failure_record import of_exception
from lockstep.runtime.interfaces import gloo_and_nccl

_PIECE = 2**16
_NOT_FOR_RANKS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "RAY_AUTH_TOKEN")
"""Variables that ranks must not inherit. Ray sets the first to the number of CPUs of an actor,
which has all ranks of its node. Ray sets the next two for its own workers. The last opens the
cluster.
"""


class Node:
    """The actor. Ray gives it two groups of threads: one passes orders on, in their order, and the
    other waits for messages. First it reports ("facts", NodeFacts).
    """

    def __init__(self, folder: str, code: str, code_digest: str) -> None:
        """`folder` is the driver's, and there the file `code` has this digest. Without a file they
        are "." and "".
        """
        self._messages: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._orders: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._reports, self._sender = Pipe(duplex=False)
        self._worker: threading.Thread | None = None
        self._reset()
        facts = NodeFacts(
            versions=versions(),
            monotonic_ns=time.monotonic_ns(),
            same_code=Path(folder).is_dir() and digest(Path(code)) == code_digest,
        )
        self._messages.put(("facts", facts))

    def start(self, job: Job, address: str) -> None:
        """Get ready for ranks. `address`: this node's, as the others reach it."""
        for name in _NOT_FOR_RANKS:
            os.environ.pop(name, None)
        streams = {}
        for kind, descriptor in (("out", 1), ("err", 2)):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            os.dup2(writing, descriptor)
            os.close(writing)
            streams[reading] = kind
        threading.Thread(
            target=self._listen, args=(streams,), name="lockstep-messages", daemon=True
        ).start()
        self._worker = threading.Thread(
            target=self._follow, args=(job, address), name="lockstep-node", daemon=True
        )
        self._worker.start()

    def send(self, kind: str, content: Any) -> None:
        """Take an order. Orders about running ranks act at once; the others wait for their turn."""
        if kind == "stop":
            self._called_off = True
        elif kind == "stall":
            self._other_nodes.note(content)
        elif kind == "signal":
            self._stop.note(content, None)
        else:
            if kind == "start":
                self._reset()
            self._orders.put((kind, content))

    def _reset(self) -> None:
        """Forget what the earlier ranks were told."""
        self._called_off = False
        self._stop = Stop(speaks=False)
        self._other_nodes = OtherNodes(self._report)

    def receive(self, seconds: float) -> list[tuple[str, object]]:
        """Return the messages since the last call, in their order; after at most `seconds`."""
        messages = []
        with suppress(Empty):
            messages.append(self._messages.get(timeout=seconds))
            while True:
                messages.append(self._messages.get_nowait())
        return messages

    def end(self) -> None:
        """End the ranks' store, once the ranks have ended."""
        if self._worker is not None:
            self._orders.put(("end", None))
            self._worker.join()

    def _report(self, kind: str, content: object) -> None:
        self._sender.send((kind, content))

    def _listen(self, streams: dict[int, str]) -> None:
        """Queue the reports and what is printed. What was printed before a report comes before
        it.
        """
        while True:
            ready = wait([self._reports, *streams])
            for descriptor, kind in streams.items():
                with suppress(BlockingIOError):
                    while data := os.read(descriptor, _PIECE):
                        self._messages.put((kind, data))
            if self._reports in ready:
                self._messages.put(self._reports.recv())

    def _follow(self, job: Job, address: str) -> None:
        """Follow the driver's orders until it says "end"."""
        try:
            with ExitStack() as stores:
                self._serve(job, address, stores)
        except Exception as error:
            self._report("gone", f"cannot start ranks: {error}")

    def _serve(self, job: Job, address: str, stores: ExitStack) -> None:
        environment = {**gloo_and_nccl(address, os.environ), **job.environment}
        if job.folder:
            os.chdir(job.folder)
        if job.call is not None:
            os.environ.update(environment)
        cold = job.launch.cold or (job.call is not None and job.call.variables is not None)
        modules = FOR_TRAININGS if job.target.ours else FOR_SCRIPTS
        server = fork_server(modules, {**os.environ, **environment}, cold=cold)
        server.ready()
        self._report("ready", None)
        while True:
            kind, content = self._orders.get()
            if kind == "end":
                return
            if kind == "store":
                stores.close()
                self._report("store", stores.enter_context(store(server, address)))
            else:
                assert isinstance(content, LocalRanks)
                outcome = self._run(job, content, environment)
                sys.stdout.flush()
                sys.stderr.flush()
                self._report("ended", outcome)

    def _run(self, job: Job, ranks: LocalRanks, environment: Variables) -> Outcome:
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
                    bind=job.launch.bind,
                )
                return Outcome(ExitCode.OK, results=results)
            if job.mark is not None:
                _check_shared(Path(job.mark[0]), job.mark[1])
            share = Share(
                ranks=ranks,
                called_off=lambda: self._called_off,
                elsewhere=self._other_nodes if ranks.nodes > 1 else None,
                stop=self._stop,
                on_checkpoint=lambda may_stop: self._report("checkpoint", may_stop),
            )
            return supervise(
                job.target,
                ranks.count,
                logs=job.logs,
                console=job.console,
                environment=environment,
                heeds=job.heeds,
                launch=job.launch,
                share=share,
                reports=False,
            )
        except Exception as error:
            # an error of the node itself is reported to the driver like a rank's failure
            failure = of_exception(error, ranks.first_rank)
            if isinstance(error, UsageError):
                failure = replace(failure, user_line="")
            return Outcome(failure.code, failure)


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
