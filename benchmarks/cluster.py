"""Does a training on a Ray cluster that loses nodes, ranks and its driver end with the weights of
one process on one host?

    python benchmarks/cluster.py --seed 0 --faults 100
    python benchmarks/cluster.py --seed 0 --faults 8

One exact training of this file's task on a cluster of up to four nodes of this machine, on
loopback, with two CPUs each. The seed draws what happens: a raylet is killed (the head's never), a
node comes, a rank is killed, or the driver is killed and the same command is given again. At the
end the training must have the SHA-256 of one worker on one host without Ray, nothing may need a
person, and when a driver was killed all processes of the run must end by themselves. Ends with 1
where any of it does not hold.

noticed   seconds from the kill to the driver's line, which is Ray's part where a node was killed;
          of a killed driver, until nothing is left
back      seconds from that line to the end of the next optimizer step
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

KINDS = ("node", "join", "rank", "driver")
CORES, MOST_NODES = 2, 4
STEPS_PER_FAULT = 40  # the training must outlast the faults
OURS = "LOCKSTEP_CLUSTER_BENCHMARK"
"""Environment variable of all processes of this benchmark's cluster: its pid."""
SECONDS = "LOCKSTEP_CLUSTER_SECONDS"
"""Environment variable: how long a micro-batch takes, so that there is time to strike."""
UNUSED_SECONDS = 15.0  # after which a node was not missed
# that processes may take to end after the driver was killed, as Ray notices it
LEAVING_SECONDS = 30.0
PATIENCE = 180.0
# Ray takes another address of this host for 127.0.0.1 otherwise
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    time.sleep(float(os.environ.get(SECONDS, "0")))
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def task() -> lockstep.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=generator)
    return lockstep.Task(
        name="cluster",
        model=lambda: nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)
        ),
        train_data=TensorDataset(x, (x[:, :4].sum(1) > 0).long()),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch=40,
        micro_batch=8,
    )


class Nodes:
    """The cluster: a head without CPUs, and workers that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": 0,
            "node_ip_address": "127.0.0.1",
            "object_store_memory": 80 * 2**20,
            "include_dashboard": False,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.workers: list[Any] = []
        for _ in range(MOST_NODES - 1):
            self.add()

    def add(self) -> None:
        self.workers.append(
            self._cluster.add_node(
                num_cpus=CORES, node_ip_address="127.0.0.1", object_store_memory=80 * 2**20
            )
        )

    def kill(self, which: int) -> None:
        self._cluster.remove_node(self.workers.pop(which), allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


@dataclass
class Run:
    """One run directory and the driver of the moment."""

    directory: Path
    address: str
    steps: int
    process: subprocess.Popen[str] | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    """The driver's lines, and when each came."""

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "train",
            __file__,
            "--exact",
            f"--ray={self.address}",
            "--run",
            str(self.directory),
        ]
        command += [
            "--workers",
            f"1:{CORES * MOST_NODES}",
            "--steps",
            str(self.steps),
            "--checkpoint-every",
            "10",
        ]
        command += ["--max-restarts", "100000"]
        env = {**os.environ, SECONDS: "0.02"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append((time.monotonic(), line.rstrip()))

    def taken(self) -> int:
        """Lines of steps in metrics.jsonl: those that were taken again count again."""
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b'"kind": "step"') if file.exists() else 0

    def heard(self, since: float, words: str) -> float | None:
        return next((when for when, line in self.said[:] if when > since and words in line), None)

    def shown(self) -> str:
        return "\n".join(line for _, line in self.said[-20:])


def launchers() -> list[psutil.Process]:
    """The processes that start ranks on the nodes of this cluster, and not on those of another
    on this machine.
    """
    found = []
    for each in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            title, *_ = each.info["cmdline"] or [""]
            ours = each.environ().get(OURS) == str(os.getpid())
            if title.startswith("ray::Node") and ours:
                found.append(each)
    return found


def ranks() -> list[psutil.Process]:
    found = [child for launcher in launchers() for child in launcher.children(recursive=True)]
    return [each for each in found if each.is_running() and each.name().startswith("rank ")]


def wait_for(what: Callable[[], Any], run: Run, why: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert run.process is not None
        if run.process.poll() is not None or time.monotonic() > end:
            raise SystemExit(
                f"cluster: {why} was not seen (the driver's exit code: {run.process.poll()}); it"
                f" said last:\n{run.shown()}"
            )
        time.sleep(0.005)
    return found


@dataclass
class Report:
    faults: Counter[str] = field(default_factory=Counter)
    noticed: dict[str, list[float]] = field(default_factory=dict)
    back: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, noticed: float, back: float) -> None:
        self.noticed.setdefault(kind, []).append(noticed)
        self.back.setdefault(kind, []).append(back)


def strike(kind: str, draw: random.Random, nodes: Nodes, run: Run, report: Report) -> None:
    """Wait for some steps, then do it, then wait until the training is back."""
    before = run.taken()
    some = draw.randint(1, 25)
    wait_for(lambda: run.taken() >= before + some, run, f"{some} more steps")
    struck = time.monotonic()
    if kind == "join":
        nodes.add()
        report.faults[kind] += 1
        return  # used from the next checkpoint on; faults go on meanwhile
    if kind == "driver":
        assert run.process is not None
        run.process.kill()
        run.process.wait()
        while launchers():
            time.sleep(0.02)
        noticed = time.monotonic()
        if noticed - struck > LEAVING_SECONDS:
            report.problems.append(
                f"{noticed - struck:.1f} s after the driver was killed processes of the run lived"
            )
        run.start()
    elif kind == "node":
        nodes.kill(draw.randrange(len(nodes.workers)))
        found = wait_for(
            lambda: run.heard(struck, "has gone") or time.monotonic() - struck > UNUSED_SECONDS,
            run,
            "the loss of a node",
        )
        if found is True:
            report.faults["node without ranks"] += 1  # one that has come just now
            return
        noticed = found
    else:
        draw.choice(wait_for(ranks, run, "a rank")).send_signal(signal.SIGKILL)
        noticed = wait_for(lambda: run.heard(struck, "was killed by"), run, "the loss of a rank")
    report.faults[kind] += 1
    reached = run.taken()
    wait_for(lambda: run.taken() > reached, run, "another step")
    report.add(kind, noticed - struck, time.monotonic() - noticed)


def undisturbed(directory: Path, steps: int) -> str:
    """Of one worker on one host, without Ray."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        __file__,
        "--exact",
        "--steps",
        str(steps),
        "--run",
        str(directory),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return str(json.loads((directory / "result.json").read_text(encoding="utf-8"))["sha256"])


def disturbed(run: Run, nodes: Nodes, count: int, seed: int) -> Report:
    report, draw = Report(), random.Random(seed)
    run.start()
    for number in range(1, count + 1):
        possible = [
            kind
            for kind in KINDS
            if not (kind == "node" and len(nodes.workers) == 1)
            and not (kind == "join" and len(nodes.workers) == MOST_NODES)
        ]
        kind = draw.choice(possible)
        strike(kind, draw, nodes, run, report)
        print(
            f"{number}/{count}: {kind}, {len(nodes.workers)} nodes, {run.taken()} steps taken",
            file=sys.stderr,
            flush=True,
        )
        if (run.directory / "result.json").exists():
            raise SystemExit(
                f"cluster: the training was over after {number} of {count} faults: raise"
                " STEPS_PER_FAULT"
            )
    assert run.process is not None
    if run.process.wait():
        report.problems.append(
            f"the last driver ended with {run.process.returncode}:\n{run.shown()}"
        )
    if left := launchers():
        report.problems.append(f"after the end there lived {[process.pid for process in left]}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100)
    asked = parser.parse_args()
    os.environ.update(ON_LOOPBACK, **{OURS: str(os.getpid())})
    steps = asked.faults * STEPS_PER_FAULT
    with tempfile.TemporaryDirectory(prefix="lockstep-cluster-") as name:
        folder = Path(name)
        expected = undisturbed(folder / "undisturbed", steps)
        nodes = Nodes()
        try:
            report = disturbed(
                Run(folder / "run", nodes.address, steps), nodes, asked.faults, asked.seed
            )
        finally:
            nodes.shutdown()
        found = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))["sha256"]
    if found != expected:
        report.problems.append(f"sha256 {found}, and {expected} of one worker on one host")
    print(f"{'':18} {'faults':>6} {'noticed p50':>12} {'back p50':>9} {'p95':>6} {'max':>6}")
    for kind, count in sorted(report.faults.items()):
        line = f"{kind:18} {count:6}"
        if kind in report.back:
            middle = quantiles([*report.noticed[kind], report.noticed[kind][0]], n=2)[0]
            back = [*report.back[kind], report.back[kind][0]]
            line += (
                f" {middle:12.2f} {quantiles(back, n=2)[0]:9.2f} {quantiles(back, n=20)[-1]:6.2f}"
                f" {max(back):6.2f}"
            )
        print(line)
    print(*report.problems, sep="\n", end="\n" if report.problems else "")
    print(
        f"seed {asked.seed}: {sum(report.faults.values())} faults, weights sha256 {found[:16]}...,"
        f" {len(report.problems)} problems"
    )
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
