"""A Ray cluster for tests: some nodes of this machine on loopback, in processes that are nobody's
children.

python tests/clusters.py NODES    a line on stdin is an order, a line on stdout its answer; the end
                                  of stdin ends the cluster
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from lockstep.launcher.start import ALIKE, WARM
from lockstep.testing.ranks import warm_commands

NODES, CORES = 3, 2
_ONE_NODE: dict[str, Any] = {
    "num_cpus": CORES,
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 80 * 2**20,
}
# Ray takes another address of this host for 127.0.0.1 otherwise
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@dataclass
class Command:
    """One that was started, until it has ended."""

    process: subprocess.Popen[str]

    def wait_for(self, file: Path) -> None:
        """Until the file is there. Fails where the command ends before."""
        until = time.monotonic() + 150
        while not file.exists():
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < until, f"{file.name} has not come"
            time.sleep(0.02)

    def end(self, seconds: float = 300) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@dataclass
class Cluster:
    address: str
    orders: IO[str]
    answers: IO[str]
    started: list[Command] = field(default_factory=list)

    def order(self, *words: str) -> str:
        self.orders.write(" ".join(words) + "\n")
        self.orders.flush()
        return self.answers.readline().strip()

    def kill_node(self) -> None:
        """SIGKILL to the raylet of the node that came last."""
        assert self.order("kill") == "killed"

    def drain_node(self, seconds: float) -> None:
        """Announce that the node that came last will be taken away."""
        assert self.order("drain", str(seconds)) == "drained"

    def add_node(self) -> None:
        assert self.order("add") == "added"

    def lockstep(self, *words: str, cwd: Path, **variables: str) -> Command:
        return self.python(
            "-m", "lockstep", words[0], f"--ray={self.address}", *words[1:], cwd=cwd, **variables
        )

    def python(self, *words: str, cwd: Path, **variables: str) -> Command:
        """A driver."""
        env = {**os.environ, **variables}
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(Command(process))
        return self.started[-1]


def left_over() -> list[psutil.Process]:
    """What lives of runs on a cluster of this machine: actors of nodes, and ranks, which the
    cluster's own warm server has forked for them.
    """
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if words and words[0].startswith("ray::Node"):
                found += [process, *process.children(recursive=True)]
            elif __file__ in words:
                found += [
                    each
                    for each in process.children(recursive=True)
                    if each.name().startswith("rank ")
                ]
    return found


def wait_until_none_is_left(seconds: float = 30) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    while (left := left_over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextmanager
def cluster(hidden: Path | None = None, nodes: int = NODES) -> Iterator[Cluster]:
    """That many nodes with two CPUs each, none of them a child of this process: Ray starts and ends
    workers there as it likes.

    `hidden`: a folder whose content they do not see. That needs root.
    """
    (orders, for_us), (answers, for_it) = reversed(os.pipe()), os.pipe()
    hide = []
    if hidden is not None:
        over = f"mount -t tmpfs none '{hidden}'"
        hide = ["unshare", "--mount", "sh", "-c", f'{over} && exec "$0" "$@"']
    started = [*hide, sys.executable, __file__, str(nodes)]
    # it has a warm server of its own
    env = {name: value for name, value in os.environ.items() if name not in (WARM, ALIKE)}
    subprocess.run(started, check=True, stdin=for_us, stdout=for_it, env={**env, **ON_LOOPBACK})
    for end in (for_us, for_it):
        os.close(end)
    with open(orders, "w") as words, open(answers) as said:
        made = Cluster(said.readline().strip(), words, said)
        assert made.address, "the cluster has not started"
        try:
            yield made
        finally:
            for command in made.started:
                command.process.kill()
                command.process.wait()
            words.close()
            said.read()  # until it has ended


def main() -> None:
    if os.fork():
        os._exit(0)  # whoever started this waits for no more
    os.setsid()
    from ray.cluster_utils import Cluster as Made

    with warm_commands():  # for what the nodes start
        _serve(Made)


def _serve(make: Any) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints too
    numbers = itertools.count()

    def one_node() -> dict[str, Any]:
        """With a folder of its own for the code that is brought to it, as on another host: a node
        overwrites what lies there, and other nodes' ranks would run in it.
        """
        return {**_ONE_NODE, "runtime_env_dir_name": f"node-{next(numbers)}"}

    made = make(initialize_head=True, head_node_args={**one_node(), "include_dashboard": False})
    nodes = [made.add_node(**one_node()) for _ in range(int(sys.argv[1]) - 1)]
    print(made.address, file=answers, flush=True)
    for line in sys.stdin:
        order, *seconds = line.split()
        if order == "kill":
            made.remove_node(nodes.pop(), allow_graceful=False)
            print("killed", file=answers, flush=True)
        elif order == "drain":
            _drain(made.address, nodes[-1].node_id, *seconds)
            print("drained", file=answers, flush=True)
        else:
            nodes.append(made.add_node(**one_node()))
            print("added", file=answers, flush=True)
    made.shutdown()


def _drain(address: str, node: str, seconds: str) -> None:
    options = (
        f"--address {address} --node-id {node} --deadline-remaining-seconds {seconds}"
        " --reason DRAIN_NODE_REASON_PREEMPTION --reason-message test"
    )
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *options.split()]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
