"""How long a command takes to start ranks, and how much memory idle ranks take, against torchrun in
the same run.

    python benchmarks/start.py
    python benchmarks/start.py --rounds 1 --workers 2
    python benchmarks/start.py --only memory

A command is measured as a whole, from its start to its exit: wall seconds, and CPU seconds (user +
system) of all its processes. Every round gives each command once, so all of them meet the same
load. The tables show the median and the 25th percentile over the rounds, and the median of the
ratios to torchrun: each ratio divides by `torchrun, gloo` of the same round and the same workers.

lockstep run             a script that calls lockstep.init() and prints its rank
torchrun, gloo           a script that calls torch.distributed.init_process_group("gloo") and prints
                         its rank
torchrun, lockstep.init  the first script under torchrun
lockstep train           digits, one step, on 1, 2 and 4 workers, each time in a new run directory
import torch             one Python process that does nothing else: the speed of the machine
lockstep --help

Memory is the proportional set size (PSS, /proc/PID/smaps_rollup) of ranks that have passed
lockstep.init() and wait. PSS divides a page by the number of processes that map it. Other programs
that map the same library files lower it; they do not change the anonymous part.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import psutil

KINDS = ("run", "train", "help", "memory")
TRAIN_WORKERS = (1, 2, 4)
PEER = "torchrun, gloo"
BIN = Path(sys.executable).parent
PATIENCE = 120.0  # seconds for idle ranks to be there
_SET_CHILD_SUBREAPER = 36  # of prctl

LOCKSTEP = """\
import sys

import lockstep

with lockstep.init() as world:
    sys.stdout.write(f"{world.rank}\\n")  # one write: print has two where output is unbuffered, and lines of ranks mix
"""
GLOO = """\
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
sys.stdout.write(f"{dist.get_rank()}\\n")
dist.destroy_process_group()
"""
IDLE = """\
import os
import sys
import time
from pathlib import Path

import lockstep

folder = Path(sys.argv[1])
with lockstep.init() as world:
    (folder / f"rank-{os.getpid()}").touch()
    while not (folder / "end").exists():
        time.sleep(0.05)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one command."""

    wall: float
    cpu: float
    """User and system, of all processes that the command started, orphans included."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Proportional set size in MiB."""

    total: float
    anonymous: float
    """The part that no file backs."""


@dataclass(frozen=True, slots=True)
class Row:
    """A command of the table."""

    name: str
    workers: int
    command: Sequence[str]
    prints_ranks: bool = False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def lockstep_run(workers: int, script: Path, *options: str) -> list[str]:
    return [str(BIN / "lockstep"), "run", "--workers", str(workers), *options, str(script)]


def torchrun(workers: int, script: Path) -> list[str]:
    """Without --standalone: a static rendezvous starts a little sooner."""
    return [
        str(BIN / "torchrun"),
        "--nproc-per-node",
        str(workers),
        "--master-port",
        str(free_port()),
        str(script),
    ]


# -- seconds -------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that their CPU time is
    counted too.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def reap_orphans() -> None:
    """Wait for all children, so that their CPU seconds count."""
    with suppress(ChildProcessError):
        while True:
            os.wait()


def measured(command: Sequence[str], folder: Path) -> tuple[Cost, str]:
    """What the command cost, and its stdout. Raises SystemExit if it fails."""
    before, began = children_cpu(), time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as errors,
    ):  # a pipe would be waited for until its last holder ends
        code = subprocess.run(
            command, cwd=folder, stdout=printed, stderr=errors, check=False
        ).returncode
        wall = time.perf_counter() - began
        reap_orphans()
        printed.seek(0)
        errors.seek(0)
        if code:
            raise SystemExit(
                f"{' '.join(command)} ended with exit code {code}:\n{printed.read()}{errors.read()}"
            )
        return Cost(wall, children_cpu() - before), printed.read()


def rows(kinds: Sequence[str], workers: Sequence[int], folder: Path, cold: bool) -> Iterator[Row]:
    """The commands of one round. `folder` holds the scripts and is new in each round."""
    scripts = {name: folder / f"{name}.py" for name in ("with_lockstep", "with_gloo")}
    scripts["with_lockstep"].write_text(LOCKSTEP)
    scripts["with_gloo"].write_text(GLOO)
    if "run" in kinds:
        for count in workers:
            yield Row("lockstep run", count, lockstep_run(count, scripts["with_lockstep"]), True)
            yield Row(PEER, count, torchrun(count, scripts["with_gloo"]), True)
            yield Row(
                "torchrun, lockstep.init", count, torchrun(count, scripts["with_lockstep"]), True
            )
            if cold:
                yield Row(
                    "lockstep run --cold",
                    count,
                    lockstep_run(count, scripts["with_lockstep"], "--cold"),
                    True,
                )
    if "train" in kinds:
        for count in sorted({*workers} & {*TRAIN_WORKERS}):
            train = [
                str(BIN / "lockstep"),
                "train",
                "digits",
                "--steps",
                "1",
                "--workers",
                str(count),
            ]
            yield Row("lockstep train", count, [*train, "--run", str(folder / f"run-{count}")])
    if "help" in kinds:
        yield Row("import torch", 1, [sys.executable, "-c", "import torch"])
        yield Row("lockstep --help", 1, [str(BIN / "lockstep"), "--help"])


def one_round(
    kinds: Sequence[str], workers: Sequence[int], cold: bool
) -> dict[tuple[str, int], Cost]:
    costs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(kinds, workers, Path(scratch), cold):
            cost, printed = measured(row.command, Path(scratch))
            ranks = sorted(int(rank) for rank in re.findall(r"(\d+)$", printed, re.MULTILINE))
            if row.prints_ranks and ranks != list(range(row.workers)):
                raise SystemExit(
                    f"{' '.join(row.command)} printed the ranks {ranks}, not 0 to"
                    f" {row.workers - 1}:\n{printed}"
                )
            costs[row.name, row.workers] = cost
            print(
                f"  {row.name}, {row.workers}: {cost.wall:.2f} s, CPU {cost.cpu:.2f} s",
                file=sys.stderr,
            )
    return costs


def lower_quarter(values: Sequence[float]) -> float:
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def ratios(costs: Sequence[Cost], peers: Sequence[Cost]) -> tuple[float, float]:
    """Medians over the rounds of this command's wall and CPU seconds as a share of the peer's."""
    pairs = list(zip(costs, peers, strict=True))
    return median(mine.wall / peer.wall for mine, peer in pairs), median(
        mine.cpu / peer.cpu for mine, peer in pairs
    )


def show(found: dict[tuple[str, int], list[Cost]]) -> None:
    print(
        f"{'':<26}{'workers':>8}{'wall s':>9}{'p25':>7}{'CPU s':>9}{'p25':>7}{'wall/torchrun':>15}{'CPU/torchrun':>14}"
    )
    for (name, workers), costs in found.items():
        wall, cpu = [cost.wall for cost in costs], [cost.cpu for cost in costs]
        line = f"{name:<26}{workers:>8}{median(wall):>9.2f}{lower_quarter(wall):>7.2f}{median(cpu):>9.2f}{lower_quarter(cpu):>7.2f}"
        peers = found.get((PEER, workers))
        if peers is not None and name in (
            "lockstep run",
            "lockstep run --cold",
            "torchrun, lockstep.init",
        ):
            by_wall, by_cpu = ratios(costs, peers)
            line += f"{by_wall:>15.2f}{by_cpu:>14.2f}"
        print(line)


# -- memory --------------------------------------------------------------------------------------


def pss(pids: Sequence[int]) -> Memory:
    """Of these processes together."""
    kib = {"Pss": 0, "Pss_Anon": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in kib:
                kib[name] += int(value.split()[0])
    return Memory(kib["Pss"] / 1024, kib["Pss_Anon"] / 1024)


@contextmanager
def idle(command: Sequence[str], ranks: int, folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """The pids of the ranks, and of the processes that start and watch them, while the ranks
    wait.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*command, str(folder)], stdout=output, stderr=output)
        try:
            end = time.monotonic() + PATIENCE
            while len(here := list(folder.glob("rank-*"))) < ranks:
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    raise SystemExit(
                        f"{' '.join(command)}: {len(here)} of {ranks} ranks have passed"
                        f" init():\n{output.read().decode()}"
                    )
                time.sleep(0.05)
            pids = [int(file.name.removeprefix("rank-")) for file in here]
            tree = [
                process.pid,
                *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
            ]
            yield pids, [pid for pid in tree if pid not in pids]
        finally:
            (folder / "end").touch()
            process.wait()


def show_memory(ranks: int, cold: bool) -> None:
    """Start idle ranks by each launcher, one after the other, and print their PSS."""
    print(f"\nPSS of {ranks} idle ranks, MiB")
    print(
        f"{'':<26}{'total':>8}{'anonymous':>11}{'ranks':>8}{'anonymous':>11}{'starters':>10}{'processes':>11}{'/torchrun':>11}"
    )
    totals: dict[str, float] = {}
    for name in ("torchrun", "lockstep run", *(["lockstep run --cold"] if cold else [])):
        with tempfile.TemporaryDirectory() as scratch:
            script = Path(scratch, "idle.py")
            script.write_text(IDLE)
            command = (
                torchrun(ranks, script)
                if name == "torchrun"
                else lockstep_run(ranks, script, *name.split()[2:])
            )
            with idle(command, ranks, Path(scratch)) as (members, starters):
                of_ranks, of_starters = pss(members), pss(starters)
        totals[name] = of_ranks.total + of_starters.total
        print(
            f"{name:<26}{totals[name]:>8.0f}{of_ranks.anonymous + of_starters.anonymous:>11.0f}{of_ranks.total:>8.0f}"
            f"{of_ranks.anonymous:>11.0f}{of_starters.total:>10.0f}{len(starters):>11}{totals[name] / totals['torchrun']:>11.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--workers",
        default="1,2,4,8",
        help="default: 1,2,4,8; lockstep train runs on those of 1, 2 and 4 among them",
    )
    parser.add_argument(
        "--ranks", type=int, default=8, help="idle ranks whose memory is read; default: 8"
    )
    parser.add_argument("--only", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--cold", action="store_true", help="also measure lockstep run --cold")
    options = parser.parse_args()
    kinds, workers = options.only.split(","), [int(count) for count in options.workers.split(",")]
    if unknown := {*kinds} - {*KINDS}:
        parser.error(f"--only {options.only}: {sorted(unknown)} is not one of {', '.join(KINDS)}")
    adopt_orphans()
    print(
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores at the start,"
        f" {options.rounds} rounds"
    )
    found: defaultdict[tuple[str, int], list[Cost]] = defaultdict(list)
    for number in range(options.rounds if {*kinds} - {"memory"} else 0):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        for key, cost in one_round(kinds, workers, options.cold).items():
            found[key].append(cost)
    if found:
        show(found)
    if "memory" in kinds:
        show_memory(options.ranks, options.cold)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
