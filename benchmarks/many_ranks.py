"""Many ranks on one host: what a start, a step, a kill and a stall cost, and how the cost grows with
the number of ranks.

    python benchmarks/many_ranks.py
    python benchmarks/many_ranks.py --only ranks --ranks 8,16 --rounds 1
    python benchmarks/many_ranks.py --only stand-ins --ranks 128,256 --rounds 1

ranks      Real ranks: they import torch, open a process group, and train a tiny model, with an
           all-reduce of each gradient. Three commands take turns:

           torchrun          a script that uses only torch.distributed
           lockstep run      the same script
           + lockstep        the script with lockstep.init() and lockstep.DistributedDataParallel, which
                             compares the replicas and tries two reductions first

           The script has neither torch's DDP nor an optimizer: both import torch._dynamo, which takes
           each of torchrun's ranks two more seconds.

           The seconds to init and to the end of the first step are those of the slowest rank, from
           the command on. Then the ranks train until one of them gets kill -9. MiB: peak resident.

stand-ins  Real: `lockstep run`, the fork server, one forked process for each rank, its pipes and its
           status page. Simulated: what the ranks do. They open no process group. Each writes into
           its page that it waits in a collective of step 3; one rank does not come. The command has
           to name that rank, and to end all others.

           start             from the command until all pages are written
           quiet             a second in which nothing happens
           stall to end      from then on, or if seconds: from the last page to the end of the
                             command, less the limit --stall-after
           MiB               peak resident memory

The last column is the curve a + c N^p that fits a row best; p = 1 is linear. If a row grows by less
than a tenth, its mean is there. Values are medians over the rounds.

PYTHONDONTWRITEBYTECODE is ignored: every rank would compile this library again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import psutil

from lockstep.tools.timing.output_files import write_json
from recover import Command, all_ended
from start import adopt_orphans, children_cpu, lockstep_run, reap_orphans, torchrun

RANKS = (8, 16, 32, 64)
STAND_INS = (128, 256, 512, 1024)
COMMANDS = ("torchrun", "lockstep run", "+ lockstep")
PATIENCE = 600.0  # seconds for all ranks to take a step
ABSENT = 5
"""The stand-in that does not come to the collective."""

Measured = dict[str, float]
"""Values by column."""


NOTE = """\
import os
import sys
import time


def note(event):
    file = os.open(os.environ["LOCKSTEP_RECOVER_NOTES"], os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{time.monotonic_ns()} {os.getpid()} {event}\\n".encode())
    os.close(file)


"""
"""recover.note, which reads what it writes: a rank imports nothing else."""
TRAIN = """\
import torch
import torch.distributed as dist

model = torch.nn.Linear(8, 8)
if "lockstep" in sys.argv:
    import lockstep

    world = lockstep.init()
    note("init")
    model = lockstep.DistributedDataParallel(model)
else:
    dist.init_process_group("gloo")
    note("init")
while True:
    model(torch.ones(4, 8)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if "lockstep" not in sys.argv:
                dist.all_reduce(parameter.grad)
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    note("step ended")
"""
STAND_IN = """\
import signal

from lockstep.runtime import status

status.step(3)
status.collective(1, "all_reduce sum f32[72] at train.py:20")
if os.environ["RANK"] != sys.argv[1]:
    status.collective(2, "all_reduce sum f32[8] at train.py:21")
    status.waits(True)
note("step ended")
signal.pause()
"""


# -- outside -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Growth:
    """The curve a + c N^p."""

    constant: float
    factor: float
    exponent: float

    def __str__(self) -> str:
        if not self.factor:
            return f"{self.constant:.3g}"
        return f"{self.constant:.2g} + {self.factor:.2g} N^{self.exponent:.1f}"


def growth(sizes: Sequence[int], values: Sequence[float]) -> Growth:
    """Return the curve that fits best by relative errors, with a and c of at least 0 and p from 0.1
    to 4. Values that grow by less than a tenth are a constant, and so are fewer than three.
    """
    if len(values) < 3 or max(values) < 1.1 * min(values) or min(values) <= 0:
        return Growth(mean(values), 0.0, 0.0)
    curves = [_fit(sizes, values, exponent / 10) for exponent in range(1, 41)]
    return min(curves, key=lambda curve: _error(curve, sizes, values))


def _fit(sizes: Sequence[int], values: Sequence[float], exponent: float) -> Growth:
    """Return the best a and c for this p. Each row, divided by its value, is to be 1."""
    rows = [(1 / value, size**exponent / value) for size, value in zip(sizes, values, strict=True)]
    ones, powers = sum(one for one, _ in rows), sum(power for _, power in rows)
    squares = sum(one * one for one, _ in rows)
    products = sum(one * power for one, power in rows)
    power_squares = sum(power * power for _, power in rows)
    determinant = squares * power_squares - products * products
    constant = (ones * power_squares - powers * products) / determinant
    factor = (powers * squares - ones * products) / determinant
    if constant < 0:
        return Growth(0.0, powers / power_squares, exponent)
    return Growth(constant, max(0.0, factor), exponent)


def _error(curve: Growth, sizes: Sequence[int], values: Sequence[float]) -> float:
    errors: list[float] = []
    for size, value in zip(sizes, values, strict=True):
        fitted = curve.constant + curve.factor * size**curve.exponent
        errors.append(float((fitted / value - 1) ** 2))
    return sum(errors)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of one process, without its children."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def peak_of(pid: int) -> float:
    """Return the peak resident MiB of one process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return float(kib) / 1024


def server_of(launcher: int) -> int | None:
    """Return the pid of the launcher's fork server; None for torchrun, whose children are ranks."""
    for child in psutil.Process(launcher).children():
        if "fork_server" in " ".join(child.cmdline()):
            pid: int = child.pid
            return pid
    return None


@contextmanager
def command_of(
    launch: Callable[..., list[str]],
    workers: int,
    script: str,
    arguments: Sequence[str],
    cost: Measured,
) -> Iterator[Command]:
    """Start a command, and note its CPU seconds after the block, with those of orphans."""
    before = children_cpu()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "script.py")
        file.write_text(NOTE + script)
        command = Command([*launch(workers, file), *arguments], Path(scratch), workers)
        try:
            yield command
        finally:
            command.end()
            reap_orphans()
    cost["CPU"] = children_cpu() - before


def step_and_kill(name: str, workers: int, draw: random.Random) -> Measured:
    """A start, steps, and kill -9 of one rank."""
    launch = torchrun if name == "torchrun" else lockstep_run
    library = "lockstep" if name == "+ lockstep" else "torch"
    cost: Measured = {}
    began = time.monotonic_ns()
    with command_of(launch, workers, TRAIN, [library], cost) as command:
        ranks = command.first_step((), PATIENCE)
        for column, event in (("init", "init"), ("step", "step ended")):
            cost[column] = ((ranks.slowest(event) or began) - began) / 1e9
        launcher = command.process.pid
        server = server_of(launcher)
        cost["launcher"] = peak_of(launcher)
        if server is not None:
            cost["server"] = peak_of(server)
        handles = [os.pidfd_open(pid) for pid in ranks.pids]
        ended: list[int] = []
        waiting = threading.Thread(target=lambda: ended.append(all_ended(handles)))
        waiting.start()
        at = time.monotonic_ns()
        os.kill(draw.choice(ranks.pids), signal.SIGKILL)
        command.process.wait()
        cost["end"] = (time.monotonic_ns() - at) / 1e9
        waiting.join()
        cost["gone"] = (ended[0] - at) / 1e9
    return cost


def stall(workers: int, stall_after: float) -> Measured:
    """A start of stand-ins, and a stall."""

    def launch(workers: int, script: Path) -> list[str]:
        return lockstep_run(workers, script, "--stall-after", str(stall_after))

    cost: Measured = {}
    whole: Measured = {}
    began = time.monotonic_ns()
    with command_of(launch, workers, STAND_IN, [str(ABSENT)], whole) as command:
        ranks = command.first_step((), PATIENCE)
        here = ranks.slowest("step ended") or began
        cost["start"] = (here - began) / 1e9
        pids = {"launcher": command.process.pid, "server": server_of(command.process.pid) or 0}
        start = {name: cpu_of(pid) for name, pid in pids.items()}
        for name in pids:
            cost[f"start {name}"] = start[name]
        noted = time.monotonic()
        time.sleep(stall_after * 0.8)
        quiet = {name: cpu_of(pid) for name, pid in pids.items()}
        seconds = time.monotonic() - noted
        for name in pids:
            cost[f"quiet {name}"] = (quiet[name] - start[name]) / seconds
        cost.update(watched_to_the_end(command, pids))
        cost["end"] = (time.monotonic_ns() - here) / 1e9 - stall_after
        for name in pids:
            cost[f"end {name}"] -= quiet[name]
        (report,) = [text for _, text in command.lines if text.startswith("STALL")]
        if f"Rank {ABSENT} never issued it" not in report:
            raise SystemExit(f"{workers} ranks: the report does not name rank {ABSENT}: {report}")
        cost["report"] = len(report)
    cost["ranks"] = whole["CPU"] - cost["end launcher"] - cost["end server"]
    for name in pids:
        cost["ranks"] -= quiet[name]
    return cost


def watched_to_the_end(command: Command, pids: dict[str, int]) -> Measured:
    """Return the CPU seconds and the peak memory of the launcher and the server, as last seen."""
    last: Measured = {}
    while command.process.poll() is None:
        for name, pid in pids.items():
            try:
                last[f"end {name}"] = cpu_of(pid)
                last[name] = peak_of(pid)
            except (psutil.Error, OSError, ValueError):  # it has just ended
                break
        time.sleep(0.02)
    return last


# -- tables --------------------------------------------------------------------------------------


def table(rows: dict[str, dict[int, float]]) -> str:
    """Return a line for each row, with its values by the number of ranks, and its curve."""
    sizes = sorted(next(iter(rows.values())))
    heads = "".join(f"{size:>9}" for size in sizes)
    lines = [f"{'N':<34}{heads}  a + c N^p"]
    for name, values in rows.items():
        cells = "".join(f"{values[size]:>9.2f}" for size in sizes)
        curve = growth(sizes, [values[size] for size in sizes])
        lines.append(f"{name:<34}{cells}  {curve}")
    return "\n".join(lines)


def medians(rounds: dict[int, list[Measured]], column: str) -> dict[int, float]:
    """Return the medians of one column, by the number of ranks."""
    return {size: median(cost[column] for cost in costs) for size, costs in rounds.items()}


def measure_ranks(sizes: Sequence[int], rounds: int) -> dict[str, dict[int, list[Measured]]]:
    draw = random.Random(0)
    found: dict[str, dict[int, list[Measured]]] = {name: defaultdict(list) for name in COMMANDS}
    for size in sizes:
        for _ in range(rounds):
            for name in COMMANDS:
                cost = step_and_kill(name, size, draw)
                found[name][size].append(cost)
                print(f"  {name}, {size}: {cost['step']:.1f} s", file=sys.stderr)
    return found


def show_ranks(found: dict[str, dict[int, list[Measured]]]) -> None:
    columns = {
        "init": "s to init",
        "step": "s to the end of the step",
        "gone": "s from the kill until all ranks are gone",
        "end": "s from the kill to the end of the command",
        "CPU": "CPU s of all processes",
        "launcher": "launcher, MiB",
        "server": "fork server, MiB",
    }
    for column, title in columns.items():
        rows = {}
        for name, rounds in found.items():
            if column != "server" or name != "torchrun":
                rows[name] = medians(rounds, column)
        print(f"\n{title}\n{table(rows)}")


def show_stand_ins(rounds: dict[int, list[Measured]]) -> None:
    titles = {
        "start": "start: s",
        "start launcher": "start: launcher, CPU s",
        "start server": "start: fork server, CPU s",
        "ranks": "all ranks together, CPU s",
        "quiet launcher": "quiet: launcher, CPU s in 1 s",
        "quiet server": "quiet: fork server, CPU s in 1 s",
        "end": "stall to end: s, less the limit",
        "end launcher": "stall to end: launcher, CPU s",
        "end server": "stall to end: fork server, CPU s",
        "launcher": "launcher, MiB",
        "server": "fork server, MiB",
    }
    print(f"\n{table({title: medians(rounds, column) for column, title in titles.items()})}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("ranks", "stand-ins"), help="default: both")
    parser.add_argument("--ranks", help=f"default: {RANKS}, and {STAND_INS} for stand-ins")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stall-after", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    adopt_orphans()
    sizes = [int(size) for size in options.ranks.split(",")] if options.ranks else None
    result: dict[str, object] = {}
    cores = len(os.sched_getaffinity(0))
    print(f"load {os.getloadavg()[0]:.1f} on {cores} cores, {options.rounds} rounds", flush=True)
    if options.only != "stand-ins":
        result["ranks"] = found = measure_ranks(sizes or RANKS, options.rounds)
        show_ranks(found)
    if options.only != "ranks":
        rows: dict[int, list[Measured]] = defaultdict(list)
        for size in sizes or STAND_INS:
            for _ in range(options.rounds):
                rows[size].append(stall(size, options.stall_after))
                print(f"  stand-ins, {size}: {rows[size][-1]['start']:.1f} s", file=sys.stderr)
        result["stand-ins"] = rows
        show_stand_ins(rows)
    write_json(options.json, result)


if __name__ == "__main__":
    main()
