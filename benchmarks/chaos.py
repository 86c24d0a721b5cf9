"""Does a training that is killed again and again end with the weights of one that never was?

    python benchmarks/chaos.py --seeds 0 --faults 200
    python benchmarks/chaos.py --seeds 0 1 2 3 4 5 6 7 --faults 250 --warm

One exact training of this file's task. A SIGKILL from outside hits a rank, two ranks, the launcher,
the fork server or a rank's loader worker, while it starts, takes steps, saves a checkpoint or
evaluates; then the same command is given again with another number of workers, 1 to 4, all drawn
from the seed. With --warm the launcher restarts the ranks by itself (--max-restarts) and is hit more
rarely; a start-up is then a restart, and a rank may be stopped (SIGSTOP) in place of killed
(--on-stall restart). When the faults are used up the training is left to end. It must have the
SHA-256 of a run without faults, every restart must go on from a checkpoint, and 5 s after a fault
(--ended-within) no process that it ended may live. Each seed is a training of its own. Ends with 1
where any of it does not hold.

goodput   the undisturbed run's seconds as a share of this one's; "ideal" is what it would be if a
          fault cost a start-up and nothing else
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

VICTIMS = ("rank", "launcher", "fork server", "loader worker")
WARM_VICTIMS = {"rank": 8, "two ranks": 6, "loader worker": 4, "stopped rank": 1, "launcher": 1}
STALL_SECONDS = 2.0
PHASES = ("start-up", "step", "save", "evaluation")
MOST_STEPS = 9  # that are taken after a start, before a step is hit
STEPS_PER_FAULT = 12  # of the whole training: it must not be over before the faults are
WARM_STEPS_PER_FAULT = 16  # it goes on by itself
EVALUATING = "LOCKSTEP_CHAOS_EVALUATING"
START, STEP = b'"event": "start"', b'"kind": "step"'  # in metrics.jsonl
PATIENCE = 120.0  # seconds for a phase to be reached
STARTING = 0.02  # seconds between two looks at a run that imports torch: a look reads all records


# -- what is trained: small, with everything whose bits could depend on who computes what --------


class Noisy(Dataset[Any]):
    """Samples that are augmented with Python's and torch's random numbers."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 16, generator=generator)
        self.y = (self.x[:, :4].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * random.uniform(0.9, 1.1) + 0.1 * torch.randn(16), self.y[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def train(self, mode: bool = True) -> Net:
        """Says from outside whether it evaluates."""
        if EVALUATING in os.environ:
            marker = Path(os.environ[EVALUATING])
            if mode:
                marker.unlink(missing_ok=True)
            else:
                marker.touch()
        return super().train(mode)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def task() -> lockstep.Task:
    """12 steps an epoch, of 5 micro-batches."""
    return lockstep.Task(
        model=Net,
        train_data=Noisy(480, 1),
        eval_data=Noisy(320, 2),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, steps
        ),
        clip=1.0,
        global_batch=40,
        micro_batch=8,
    )


# -- the run, from outside -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall be killed, and when."""

    victim: str
    phase: str
    workers: int
    steps: int
    """That are taken after the start, before a step is hit."""
    delay: float
    """Seconds after the phase was seen; in a start-up, after the command was given."""
    which: float
    """In [0, 1): which of several."""


def faults(count: int, seed: int, *, warm: bool) -> Iterator[Fault]:
    draw = random.Random(seed)
    for _ in range(count):
        phase = draw.choice(PHASES)
        if warm:
            yield Fault(
                victim=draw.choices([*WARM_VICTIMS], [*WARM_VICTIMS.values()])[0],
                phase=phase,
                workers=draw.randint(2, 3),
                steps=draw.randint(1, MOST_STEPS),
                delay=draw.uniform(0, 0.2 if phase == "start-up" else 0.01),
                which=draw.random(),
            )
            continue
        yield Fault(
            # loader workers come with the first step
            victim=draw.choice(VICTIMS[:3] if phase == "start-up" else VICTIMS),
            phase=phase,
            workers=draw.randint(1, 4),
            steps=draw.randint(1, MOST_STEPS),
            delay=draw.uniform(0, 2) if phase == "start-up" else draw.uniform(0, 0.01),
            which=draw.random(),
        )


@dataclass
class Run:
    """One run directory, and the processes of its present generation."""

    directory: Path
    steps: int
    warm: bool = False
    ended_within: float = 5.0
    """Seconds."""
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    ended_ranks: set[int] = field(default_factory=set)
    """Pids of generations before."""
    ending: list[psutil.Process] = field(default_factory=list)
    """What the last fault ended."""
    hit: str = ""
    """What that was."""
    # what of metrics.jsonl was read, and what this generation has written
    _file: int = 0
    _read: int = 0
    _starts: int = 0
    _starts_before: int = 0
    _taken: int = 0
    _last_step: int = 0

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def marker(self) -> Path:
        return self.directory.with_name("evaluating")

    @property
    def output(self) -> Path:
        return self.directory.with_name("output")

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def begin(self) -> None:
        """What is written from now on is of another generation."""
        self.marker.unlink(missing_ok=True)
        self._look()
        self._starts_before = self._starts
        self.started = time.monotonic()

    def start(self, workers: int) -> None:
        """Give the command, as a person would."""
        self.begin()
        options = {
            "run": self.directory,
            "workers": workers,
            "steps": self.steps,
            "checkpoint-every": 5,
            "loader-workers": 1,
        }
        if self.warm:
            options |= {
                "max-restarts": 10**6,
                "on-stall": "restart",
                "stall-after": STALL_SECONDS,
            }
        command = [sys.executable, "-m", "lockstep", "train", __file__, "--exact"]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                # without a test suite's warm server: the ranks are to be found among the launcher's
                # children
                env={
                    **{
                        name: value
                        for name, value in os.environ.items()
                        if not name.startswith("LOCKSTEP_WARM_SERVER")
                    },
                    EVALUATING: str(self.marker),
                },
            )

    def ended(self) -> str:
        """Its end is waited for: what it said."""
        assert self.process is not None
        self.process.wait()
        return self.output.read_text(errors="replace")

    def _look(self) -> None:
        """Read what was written since the last look; all, where a restart has taken records
        back.
        """
        if not self.metrics.exists():
            return
        with self.metrics.open("rb") as file:
            known = os.fstat(file.fileno())
            if known.st_ino != self._file or known.st_size < self._read:
                self._file, self._read, self._starts, self._taken = known.st_ino, 0, 0, 0
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        *before, latest = whole.split(START)
        self._starts += len(before)
        self._taken = latest.count(STEP) + (0 if before else self._taken)
        if steps := re.findall(rb'"kind": "step", "step": (\d+)', whole):
            self._last_step = int(steps[-1])

    def last_step(self) -> int:
        self._look()
        return self._last_step

    def taken(self) -> int:
        """Steps that this generation has taken."""
        self._look()
        # else a rank that is ending has written them
        return self._taken if self._starts > self._starts_before else 0

    def computing(self) -> bool:
        return self.taken() > 0

    def saving(self) -> bool:
        return any((self.directory / "checkpoints").glob(".step-*.unfinished"))

    def processes(self) -> dict[str, list[psutil.Process]]:
        """That are alive, by what they are."""
        assert self.process is not None
        found: dict[str, list[psutil.Process]] = {victim: [] for victim in VICTIMS}
        if self.process.poll() is not None:
            return found
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            found["launcher"] = [launcher]
            for child in launcher.children():
                found["fork server"].append(child)
            for process in launcher.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if _is_rank(process.parent()):
                        found["loader worker"].append(process)
                    elif _is_rank(process) and process.pid not in self.ended_ranks:
                        found["rank"].append(process)
        return found


def _is_rank(process: psutil.Process | None) -> bool:
    return process is not None and process.name().startswith("rank ")


@dataclass
class Report:
    """What happened."""

    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    workers: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def unrecoverable(self, fault: Fault, run: Run) -> None:
        """It ended before the fault could strike."""
        self.problems.append(f"a start on {fault.workers} workers ended by itself:\n{run.ended()}")


def wait_for(what: Callable[[], bool], run: Run, pause: float = 0.001) -> bool:
    """Until it is so; False where the run ended before."""
    assert run.process is not None
    end = time.monotonic() + PATIENCE
    while not what():
        if run.process.poll() is not None:
            return False
        if time.monotonic() > end:
            raise SystemExit(
                f"chaos: {PATIENCE:.0f} s have passed and {what.__name__} was not seen;"
                f" {run.directory} shows how far it came"
            )
        time.sleep(pause)
    return True


def strike(fault: Fault, run: Run, report: Report) -> None:
    """In a generation, which is started where none runs, kill what the fault says when it says
    it.
    """
    if not run.running:
        run.start(fault.workers)
        report.workers[fault.workers] += 1
    if fault.phase != "start-up":
        if not wait_for(run.computing, run, STARTING):
            return report.unrecoverable(fault, run)
        report.starts.append(time.monotonic() - run.started)
        reached: dict[str, Callable[[], bool]] = {
            "step": lambda: run.taken() >= fault.steps,
            "save": run.saving,
            "evaluation": run.marker.exists,
        }
        if not wait_for(reached[fault.phase], run):
            return report.unrecoverable(fault, run)
    elif (
        fault.victim != "launcher"
        and (run.warm or fault.victim == "rank")
        and not wait_for(lambda: bool(run.processes()["rank"]), run, STARTING)
    ):
        return report.unrecoverable(fault, run)
    time.sleep(fault.delay)
    alive = run.processes()
    of = "rank" if fault.victim in ("two ranks", "stopped rank") else fault.victim
    # a loader worker lives for an epoch
    victim = fault.victim if alive[of] else "rank" if run.warm and alive["rank"] else "launcher"
    candidates = alive[of] or alive[victim]
    if not candidates:
        return report.unrecoverable(fault, run)
    first = int(fault.which * len(candidates))
    phase = fault.phase if fault.phase != "start-up" or not run.computing() else "step"
    stays = run.warm and victim != "launcher"
    ending = [
        process
        for group in (("rank", "loader worker") if stays else alive)
        for process in alive[group]
    ]
    run.ended_ranks |= {process.pid for process in alive["rank"]}
    run.begin()
    for process in {
        candidates[first],
        candidates[first - 1] if victim == "two ranks" else candidates[first],
    }:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP if victim == "stopped rank" else signal.SIGKILL)
    report.hits[victim, phase] += 1
    if (
        victim == "fork server" and phase == "start-up" and wait_for(run.computing, run)
    ):  # it had forked no rank: another has taken its place
        ending += [process for group in run.processes().values() for process in group]
        run.processes()["launcher"][0].kill()
    said = "" if stays else run.ended()
    # a restart that is under way can be hit: until then nobody waits for the old ranks
    check_ended(run, report)
    run.ending, run.hit = ending, f"{victim} was hit ({phase})"
    if not stays:
        check_ended(run, report)
    if (
        not run.running
        and run.process is not None
        and run.process.returncode == 0
        and victim != "launcher"
        and not (run.directory / "result.json").exists()
    ):
        report.problems.append(
            f"{victim} was killed ({phase}) and the command ended with 0:\n{said}"
        )
    return None


def lives(process: psutil.Process) -> bool:
    """A zombie does not: it waits for the system to take note of its end."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.is_running())
    except psutil.NoSuchProcess:
        return False


def check_ended(run: Run, report: Report) -> None:
    """What the last fault ended must have ended by now, or soon."""
    end = time.monotonic() + run.ended_within
    while (left := [each for each in run.ending if lives(each)]) and time.monotonic() < end:
        time.sleep(STARTING)
    if left:
        report.problems.append(
            f"long after {run.hit} there still lived {[process.pid for process in left]}"
        )
    run.ending = []


def resumed_at(said: str) -> int | None:
    found = re.search(r"resumed from step (\d+)", said)
    return int(found[1]) if found else None


def undisturbed(directory: Path, steps: int, workers: int) -> tuple[str, float]:
    """The hash, and the seconds of the training itself."""
    run = Run(directory, steps)
    run.start(workers)
    said = run.ended()
    if run.process is None or run.process.returncode:
        raise SystemExit(f"chaos: the run without faults failed:\n{said}")
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    return result["sha256"], result["seconds"]


def disturbed(run: Run, count: int, seed: int) -> Report:
    """Until all faults have struck, and then to the end."""
    report = Report()
    began = time.monotonic()
    before = counted = 0
    for number, fault in enumerate(faults(count, seed, warm=run.warm), 1):
        strike(fault, run, report)
        if (run.directory / "result.json").exists():
            raise SystemExit(
                f"chaos: the training was over after {number} of {count} faults: raise"
                " STEPS_PER_FAULT"
            )
        reached = run.last_step()
        newest = max(
            (
                int(path.name.removeprefix("step-"))
                for path in (run.directory / "checkpoints").glob("step-*")
            ),
            default=0,
        )
        if newest < before:
            report.problems.append(
                f"fault {number}: the newest checkpoint is of step {newest}, and there was one of"
                f" {before}"
            )
        before = newest
        # else it was counted before
        report.lost.append(max(0, reached - newest) if reached > counted else 0)
        counted = reached
        print(
            f"{number}/{count}: {fault.victim}, {fault.phase}, {fault.workers} workers: at step"
            f" {reached}, back to {newest}",
            file=sys.stderr,
        )
    if not run.running:
        run.start(4)
    said = run.ended()
    check_ended(run, report)
    if run.process is None or run.process.returncode:
        report.problems.append(f"the last start did not come to its end:\n{said}")
    elif before and not run.warm and resumed_at(said) != before:
        report.problems.append(f"the last start did not go on from step {before}:\n{said}")
    report.seconds = time.monotonic() - began
    return report


def show(report: Report, plain: float) -> None:
    print(f"{'':<14}{''.join(f'{phase:>12}' for phase in PHASES)}")
    for victim in sorted({victim for victim, _ in report.hits}):
        print(f"{victim:<14}{''.join(f'{report.hits[victim, phase]:>12}' for phase in PHASES)}")
    start = median(report.starts) if report.starts else 0.0
    struck = sum(report.hits.values())
    print(
        f"faults {struck}, restarts {len(report.lost)}, on 1 to 4 workers"
        f" {[report.workers[count] for count in (1, 2, 3, 4)]}"
    )
    print(
        f"steps lost {sum(report.lost)}, at most {max(report.lost, default=0)} by one fault (a"
        " checkpoint every 5)"
    )
    ideal = plain / (plain + (struck + 1) * start)
    print(
        f"{report.seconds:.0f} s; {plain:.0f} s without faults; a start takes {start:.1f} s: "
        f"goodput {plain / report.seconds:.3f}, ideal {ideal:.3f}"
    )


def one_seed(
    run: Run, options: argparse.Namespace, seed: int, without: tuple[str, float]
) -> Report:
    """Print what happened, and return it."""
    expected, plain = without
    report = disturbed(run, options.faults, seed)
    show(report, plain)
    finished = run.directory / "result.json"
    found = (
        json.loads(finished.read_text(encoding="utf-8"))["sha256"]
        if finished.exists()
        else "none: it did not end"
    )
    if found != expected:
        report.problems.append(f"its weights have another hash: {found}")
    print(
        "\n".join(report.problems) or f"seed {seed}: weights sha256 {found}: the same", flush=True
    )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--faults", type=int, default=200, help="of each seed")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--ended-within", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args()
    steps = (WARM_STEPS_PER_FAULT if options.warm else STEPS_PER_FAULT) * (options.faults + 6)
    with tempfile.TemporaryDirectory() as scratch:
        without = undisturbed(Path(scratch, "undisturbed"), steps, workers=2)
        print(f"{steps} steps without faults: weights sha256 {without[0]}", flush=True)
        struck = problems = 0
        for seed in options.seeds:
            directory = Path(scratch, f"seed-{seed}", "run")
            directory.parent.mkdir()
            run = Run(directory, steps, options.warm, options.ended_within)
            report = one_seed(run, options, seed, without)
            struck += sum(report.hits.values())
            problems += len(report.problems)
    print(f"{struck} faults with {len(options.seeds)} seeds, {problems} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
