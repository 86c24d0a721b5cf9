"""Is the right rank blamed? Failures and stalls on purpose, drawn from a seed, and what the
launcher says of them.

    python benchmarks/faults.py --seed 0 --failures 100 --stalls 5

Failures, of six kinds on 4 ranks: an exception, an exit code, an early end, SIGKILL, SIGSEGV, a
killed loader worker, at a random rank, step and phase. Blamed right is: the last two lines name
that rank and no other as the cause. Stalls, of eight kinds, so many of each: the loader sleeps, an
endless loop in the forward, SIGSTOP, the interpreter held in C, rank 0 hangs in a checkpoint, an
early end, a collective that the others do not call, and a rank that is slow and alive. Right is:
rank, phase and line are named, two seconds after the quiet time at most; the slow one is called
slow, and nothing is ended. Exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

WORKERS = 4
QUIET = 5.0  # seconds, in place of thirty
LATE = 2.0
FAILURES = ("exception", "exit code", "early end", "SIGKILL", "SIGSEGV", "loader worker")
STALLS = (
    "loader sleeps",
    "endless loop",
    "SIGSTOP",
    "interpreter held",
    "in a checkpoint",
    "early end",
    "other collective",
    "slow",
)
PHASES = ("data", "forward", "backward", "reduce", "optimizer")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    rank: int
    step: int
    phase: str


# -- a rank --------------------------------------------------------------------------------------


def rank(fault: Fault, folder: str) -> None:
    """Train, with the fault."""
    import torch
    from torch.utils.data import Dataset

    import lockstep
    from lockstep import testing

    me = int(os.environ["RANK"])

    def struck() -> None:
        Path(folder, "struck").write_text(str(time.monotonic()))

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 64000

        def __getitem__(self, index: int) -> Any:
            if (
                fault.kind == "loader sleeps"
                and index // 4 % WORKERS == fault.rank
                and index >= 16 * (fault.step - 1)
            ):
                struck()
                time.sleep(3600)
            return torch.ones(3)

    class Net(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            if (
                fault.kind == "endless loop"
                and me == fault.rank
                and stepper.steps + 1 == fault.step
            ):
                struck()
                while True:
                    pass
            return super().forward(x)

    def strike() -> None:
        struck()
        if fault.kind == "exit code":
            os._exit(7)
        if fault.kind == "early end":
            os._exit(0)
        if fault.kind in ("SIGKILL", "SIGSEGV", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[fault.kind])
        if fault.kind == "loader worker":
            import psutil

            psutil.Process().children()[0].kill()
        if fault.kind == "exception":
            raise ArithmeticError("on purpose")
        if fault.kind == "interpreter held":
            import ctypes

            ctypes.PyDLL(None).sleep(3600)
        if fault.kind == "in a checkpoint":
            time.sleep(3600)

    with lockstep.init():
        if fault.kind == "slow":
            testing.slow_at(fault.rank, fault.step, fault.phase, 0.3)
        elif fault.kind not in ("loader sleeps", "endless loop", "other collective"):
            from lockstep.runtime import status

            done = False

            def meet(step: int, phase: str) -> None:
                nonlocal done
                if not done and (me, step, phase) == (fault.rank, fault.step, fault.phase):
                    done = True
                    strike()

            status.on_phase(meet)
        model = Net(3, 1)
        stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1))
        workers = 1 if fault.kind in ("loader worker", "loader sleeps") else 0
        loader = lockstep.Loader(
            Samples(), global_batch=16, micro_batch=4, shuffle=False, num_workers=workers
        )
        checkpoints = lockstep.Checkpoints(Path(folder, "checkpoints"), stepper, loader, every=1000)
        for window in next(iter(loader.epochs(1))):
            for x in stepper.micro_batches(window):
                stepper.backward(model(x).sum(), weight=len(x))
            stepper.step()
            if fault.kind == "in a checkpoint" and me == 0 and stepper.steps == fault.step:
                with status.inside("checkpoint"):
                    pass
            if (
                fault.kind == "other collective"
                and me == fault.rank
                and stepper.steps == fault.step
            ):
                struck()
                lockstep.collectives.broadcast(torch.ones(2))
            if stepper.steps == (60 if fault.kind == "slow" else 400):
                break
        checkpoints.close()


# -- outside -------------------------------------------------------------------------------------


def run(fault: Fault, folder: Path) -> tuple[int, list[str], float]:
    """Exit code, lines of stderr, and the seconds from the fault to the word about a stall."""
    (folder / "struck").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--workers",
        str(WORKERS),
        "--stall-after",
        str(QUIET),
    ]
    process = subprocess.Popen(
        [*command, __file__, "--rank", json.dumps(asdict(fault)), str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines, told = [], math.inf
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith("STALL"):
            told = time.monotonic()
    struck = folder / "struck"
    return process.wait(), lines, told - float(struck.read_text()) if struck.exists() else math.inf


def blamed(fault: Fault, lines: list[str]) -> bool:
    """Whether that rank, and it alone, is what the last lines say."""
    end = lines[-2:]
    if fault.kind == "early end":
        return bool(end) and (
            end[-1].startswith(f"rank {fault.rank} had finished before that")
            or f"rank {fault.rank} (pid" in end[-1]
        )
    return bool(end) and bool(re.match(rf"rank {fault.rank} \(pid ", end[-1]))


def named(fault: Fault, code: int, lines: list[str]) -> bool:
    """Whether a stall was told as it should be."""
    text = "\n".join(lines)
    if fault.kind == "slow":
        return (
            code == 0 and f"for rank {fault.rank}, which is alive" in text and "STALL" not in text
        )
    if fault.kind == "early end":
        return blamed(fault, lines)
    if fault.kind == "other collective":
        return f"rank {fault.rank} broadcast" in text and "faults.py:" in text
    where = {
        "loader sleeps": r"in data, faults.py:\d+ __getitem__",
        "endless loop": r"in forward, faults.py:\d+ forward",
        "SIGSTOP": rf"stopped \(SIGSTOP or a debugger\), in (the )?{fault.phase}",
        "interpreter held": rf"in (the )?{fault.phase}, faults.py:\d+ strike",
        "in a checkpoint": r"in a checkpoint, faults.py:\d+ strike",
    }[fault.kind]
    found = (
        re.search(
            rf"Rank {fault.rank} (never issued it|is in the middle of it): {where}", lines[-1]
        )
        if lines
        else None
    )
    return code == 76 and found is not None


def drawn(kind: str, draw: random.Random) -> Fault:
    if kind == "in a checkpoint":
        return Fault(kind, 0, draw.randint(3, 9), "checkpoint")
    phase = (
        "forward"
        if kind == "endless loop"
        else "data"
        if kind == "loader sleeps"
        else draw.choice(PHASES)
    )
    return Fault(kind, draw.randrange(WORKERS), draw.randint(3, 9), phase)


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank(Fault(**json.loads(sys.argv[2])), sys.argv[3])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=100)
    parser.add_argument("--stalls", type=int, default=5, help="of each kind")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    right: Counter[str] = Counter()
    count: Counter[str] = Counter()
    late: list[float] = []
    wrong: list[str] = []
    todo = [(True, drawn(draw.choice(FAILURES), draw)) for _ in range(options.failures)]
    todo += [(False, drawn(kind, draw)) for kind in STALLS for _ in range(options.stalls)]
    with tempfile.TemporaryDirectory() as scratch:
        for fails, fault in todo:
            code, lines, since = run(fault, Path(scratch))
            name = f"{'failure' if fails else 'stall'}: {fault.kind}"
            good = code != 0 and blamed(fault, lines) if fails else named(fault, code, lines)
            if code == 76:
                late.append(since - QUIET)
                good = good and late[-1] <= LATE
            count[name] += 1
            right[name] += good
            if not good:
                wrong.append(f"{fault}: exit code {code}\n" + "\n".join(lines[-4:]))
            print(
                f"{sum(count.values())}/{len(todo)} {name}, rank {fault.rank}:"
                f" {'right' if good else 'WRONG'}",
                file=sys.stderr,
            )
    for name in count:
        print(f"{name:<28} {right[name]:>4} of {count[name]:>3}")
    print(f"seed {options.seed}: {sum(right.values())} of {sum(count.values())} right", end="")
    print(
        f"; a stall was told {median(late):.1f} s after the fault and the quiet time, at most"
        f" {max(late):.1f}"
        if late
        else ""
    )
    print("\n".join(wrong), end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
