"""How long a training stands still when a rank is killed: from kill -9 to the end of the next
optimizer step.

    python benchmarks/recover.py
    python benchmarks/recover.py --kills 5 --exact
    python benchmarks/recover.py --torchrun

`lockstep train` trains digits and restarts after each kill (--max-restarts). A random rank gets
SIGKILL after 0.5 to 2 s of steps, again and again. Every rank appends a line to a file at the end
of each optimizer step (Task.on_step); the step has ended when the slowest rank says so. With
--torchrun, a plain DDP script trains the same model on the same data under `torchrun
--max-restarts`, with a checkpoint every --checkpoint-every steps (default: 1), and is killed the
same way. There TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set: without it, torch 2.13 gives a restart
the store of the start before, and the new ranks connect to addresses of dead ones.

The table shows the seconds since the kill, and the seconds since the event before (p50). Each is of
the slowest rank:

ranks ended      no process of the old ranks is alive
launcher's line  the launcher printed which rank was killed
rank begun       the process of the new rank exists (10 ms resolution)
imports done     the task's file (torchrun: the script) has imported what it needs, torch included
model built      the model's constructor has been called
step ended       the rank has finished its first optimizer step
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lockstep

NOTES = "LOCKSTEP_RECOVER_NOTES"  # the file to which ranks append "<monotonic ns> <pid> <event>"
EVENTS = (
    "ranks ended",
    "launcher's line",
    "rank begun",
    "imports done",
    "model built",
    "step ended",
)
STEADY = (0.5, 2.0)  # seconds of steps before the next kill
PATIENCE = 120.0  # seconds for a generation to take its first step
BIN = Path(sys.executable).parent


# -- what is trained -----------------------------------------------------------------------------


def note(event: str) -> None:
    """Append a line with one write, so that the lines of several processes do not mix."""
    file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{time.monotonic_ns()} {os.getpid()} {event}\n".encode())
    os.close(file)


def task() -> lockstep.Task:
    """digits, and each rank notes how far it is."""
    from dataclasses import replace

    from torch import nn

    from lockstep.tasks import digits

    note("imports done")
    plain = digits.task(epochs=100_000)

    def model() -> nn.Module:
        built = plain.model()
        note("model built")
        return built

    return replace(
        plain, model=model, on_step=lambda record: note("step ended"), callbacks_on="all"
    )


def train_with_ddp(checkpoint: Path, every: int) -> None:
    """The same model and data under torch's DDP. Resumes from `checkpoint`."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from lockstep.tasks import digits

    note("imports done")
    dist.init_process_group("gloo")
    plain = digits.task()
    model = DistributedDataParallel(plain.model(), gradient_as_bucket_view=True)
    note("model built")
    optimizer = plain.optimizer(model)
    steps = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        steps = saved["steps"]
    data, _ = digits.datasets()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, plain.global_batch // dist.get_world_size(), sampler=sampler)
    while True:
        sampler.set_epoch(steps // len(loader))
        for batch in loader:
            total, weight = plain.loss(model(batch[0]), batch)
            optimizer.zero_grad()
            (total / weight).backward()
            optimizer.step()
            steps += 1
            note("step ended")
            if steps % every == 0 and dist.get_rank() == 0:
                unfinished = checkpoint.with_suffix(".unfinished")
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "steps": steps,
                    },
                    unfinished,
                )
                unfinished.replace(checkpoint)


# -- outside -------------------------------------------------------------------------------------


@dataclass
class Generation:
    """What the ranks of one start have noted: the first time of each event, by pid."""

    at: dict[int, dict[str, int]] = field(default_factory=dict)

    def hears(self, nanoseconds: int, pid: int, event: str) -> None:
        self.at.setdefault(pid, {}).setdefault(event, nanoseconds)

    def steps(self, workers: int) -> bool:
        """Whether every rank has finished a step."""
        return sum("step ended" in events for events in self.at.values()) == workers

    def slowest(self, event: str) -> int | None:
        """When the last rank noted the event; None where it is noted by no rank."""
        return max(
            (
                events[event]
                for events in self.at.values()
                if "step ended" in events and event in events
            ),
            default=None,
        )

    @property
    def pids(self) -> list[int]:
        return [pid for pid, events in self.at.items() if "step ended" in events]


def begun(pid: int) -> int:
    """When the process began, on the monotonic clock."""
    # since the machine's start
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    since_start = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") - since_start


class Command:
    """A training in its own processes: its notes, its stderr with the time of every line, and
    its end.
    """

    def __init__(self, command: Sequence[str], folder: Path, workers: int) -> None:
        self._notes, self._workers, self._read = folder / "notes", workers, 0
        self._notes.touch()
        self.lines: list[tuple[int, str]] = []
        environment = {
            **os.environ,
            NOTES: str(self._notes),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._keep_lines)
        self._reader.start()

    def _keep_lines(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append((time.monotonic_ns(), line))

    def first_step(self, old: Sequence[int], patience: float = PATIENCE) -> Generation:
        """Wait until every rank of a generation has finished a step. Notes of the `old` pids
        belong to the one before.
        """
        generation, end = Generation(), time.monotonic() + patience
        while not generation.steps(self._workers):
            if self.process.poll() is not None or time.monotonic() > end:
                said = "".join(line for _, line in self.lines[-30:])
                raise SystemExit(
                    f"no optimizer step within {patience:.0f} s of the start or the kill; the"
                    f" command's last lines:\n{said}"
                )
            time.sleep(0.005)
            for nanoseconds, pid, event in self._new_notes():
                if pid not in old:
                    generation.hears(nanoseconds, pid, event)
        return generation

    def _new_notes(self) -> list[tuple[int, int, str]]:
        with self._notes.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        notes = [line.split(maxsplit=2) for line in whole.decode().splitlines()]
        return [(int(nanoseconds), int(pid), event) for nanoseconds, pid, event in notes]

    def end(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self._reader.join()


def all_ended(handles: Sequence[int]) -> int:
    """Wait for the processes of these pidfds: when the last ended."""
    for handle in handles:
        select.select([handle], [], [])
        os.close(handle)
    return time.monotonic_ns()


def kill_one(
    command: Command, running: Generation, draw: random.Random, steady: tuple[float, float]
) -> tuple[dict[str, float], Generation]:
    """Kill a random rank after some seconds of steps: the seconds from the kill to each event,
    and the next generation.
    """
    time.sleep(draw.uniform(*steady))
    handles = [os.pidfd_open(pid) for pid in running.pids]
    victim, heard = draw.choice(running.pids), len(command.lines)
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(all_ended(handles)))
    waiting.start()
    at = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    following = command.first_step(running.pids)
    waiting.join()
    named = re.compile(rf"\bpid:? {victim}\b")
    line = next((when for when, text in command.lines[heard:] if named.search(text)), None)
    times = {
        "ranks ended": ended[0],
        "launcher's line": line,
        "rank begun": max(begun(pid) for pid in following.pids),
        **{event: following.slowest(event) for event in EVENTS[3:]},
    }
    return {
        event: (when - at) / 1e9 for event, when in times.items() if when is not None
    }, following


def command_line(options: argparse.Namespace, folder: Path) -> list[str]:
    count, kills = str(options.workers), str(options.kills + 1)
    if options.torchrun:
        every = str(options.checkpoint_every or 1)
        ddp = [__file__, "--ddp", str(folder / "checkpoint"), every]
        return [
            str(BIN / "torchrun"),
            "--standalone",
            "--nproc-per-node",
            count,
            "--max-restarts",
            kills,
            *ddp,
        ]
    train = [
        str(BIN / "lockstep"),
        "train",
        __file__,
        "--workers",
        count,
        "--max-restarts",
        kills,
        "--run",
        str(folder / "run"),
    ]
    saving = (
        ["--checkpoint-every", str(options.checkpoint_every)] if options.checkpoint_every else []
    )
    return [*train, *saving, *(["--exact"] if options.exact else [])]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least this share of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def show(kills: Sequence[Mapping[str, float]]) -> None:
    print(
        f"{'seconds since the kill':<24}{'p50':>7}{'p95':>7}{'max':>7}{'since the event before, p50':>30}"
    )
    before = ""
    for event in EVENTS:
        values = [kill[event] for kill in kills if event in kill]
        if not values:
            print(f"{event:<24}{'-':>7}")
            continue
        parts = [kill[event] - kill.get(before, 0.0) for kill in kills if event in kill]
        print(
            f"{event:<24}{percentile(values, 0.5):>7.2f}{percentile(values, 0.95):>7.2f}{max(values):>7.2f}{median(parts):>30.2f}"
        )
        before = event


def main() -> None:
    if sys.argv[1:2] == ["--ddp"]:
        return train_with_ddp(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="default: that of lockstep train; with --torchrun: 1",
    )
    parser.add_argument("--exact", action="store_true")
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help="a DDP script under torchrun in place of lockstep train",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, kills, load = random.Random(options.seed), [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        line = command_line(options, Path(scratch))
        command = Command(line, Path(scratch), options.workers)
        try:
            running = command.first_step(())
            for number in range(options.kills):
                times, running = kill_one(command, running, draw, STEADY)
                kills.append(times)
                print(f"{number + 1}/{options.kills}: {times['step ended']:.2f} s", file=sys.stderr)
        finally:
            command.end()
    name = (
        "torchrun, DDP"
        if options.torchrun
        else f"lockstep train{' --exact' if options.exact else ''}"
    )
    print(
        f"{name}: digits, {options.workers} workers, {len(kills)} kills, seed {options.seed}",
        end="; ",
    )
    print(
        f"load {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end,"
        f" {len(os.sched_getaffinity(0))} cores"
    )
    show(kills)
    return None


if __name__ == "__main__":
    main()
