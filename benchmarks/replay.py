"""Can any step of a recorded run be computed again?

    python benchmarks/replay.py
    python benchmarks/replay.py --steps 200 --draws 50

1. digits, exact, on 3 workers, one of which is killed on the way; then in the ordinary mode. Random
   steps are replayed on 1, 2 and 4 workers, and their losses compared with the recorded ones.
2. A sample has a wrong scale (x 1e4): `--step worst --samples 1` must name it.
3. A bit of a weight flips after a random step, with the checks off: `--bisect` must name the next step,
   which is the first that the flip can be seen in.
4. The task is edited in the middle of a run: the replay must say so.

Ends with 1 where any of it does not hold. What is printed is in docs/performance.md.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lockstep
from lockstep.tools.replay.bisect_run import first_irreproducible
from lockstep.tools.replay.computed import Detail
from lockstep.tools.replay.steps import compare, compute, plan_of, steps_of

KILLED = """
import os, pathlib
import lockstep.testing
from lockstep.tasks import digits

once = pathlib.Path(__file__).with_suffix(".once")
if os.environ.get("RANK") == "1" and not once.exists():
    once.touch()
    lockstep.testing.kill_at(rank=1, step={step}, phase="forward")

def task():
    return digits.task()
"""
PLANTED = """
from dataclasses import replace
import torch
from lockstep.tasks import digits

MODELS = []
class Scaled(torch.utils.data.Dataset):
    def __init__(self, data, bad):
        self.data, self.bad = data, bad
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        x, y = self.data[index]
        return (x * 1e4, y) if index == self.bad else (x, y)

def task(bad: int = -1, bit: int = 0):
    plain = digits.task()
    def model():
        # with BatchNorm the other samples of a micro-batch have the high losses, not the scaled one
        without_norm = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU()]
        net = torch.nn.Sequential(*without_norm, torch.nn.Linear(32, 10))
        MODELS.append(net if bad >= 0 else plain.model())
        return MODELS[-1]
    def on_step(record):
        import os
        if str(record["step"]) == os.environ.get("FLIP"):
            weights = [p for p in MODELS[-1].parameters() if p.ndim > 1]
            flat = weights[bit % len(weights)].detach().reshape(-1)
            flat[bit % flat.numel()].view(torch.int32).bitwise_xor_(1 << 28)
    return replace(plain, model=model, train_data=Scaled(plain.train_data, bad), on_step=on_step)
"""


def train(folder: Path, task: str, *options: str, flip: int = 0) -> Path:
    """Run `lockstep train` on the CPU, and return its run directory."""
    path = folder / f"run-{time.monotonic_ns()}"
    line = [sys.executable, "-m", "lockstep", "train", task, "--run", str(path), "--device", "cpu"]
    environment = {**os.environ, **({"FLIP": str(flip)} if flip else {})}
    ended = subprocess.run(
        [*line, *options], capture_output=True, text=True, cwd=folder, env=environment
    )
    if ended.returncode:
        sys.exit(ended.stderr)
    return path


def random_steps(path: Path, chance: random.Random, draws: int) -> tuple[list[str], bool]:
    """Replay random steps of a run on 1, 2 and 4 workers. Return a row each, and whether all agree."""
    run = lockstep.runs.read(path)
    rows = []
    good = True
    steps = sorted(chance.sample(range(1, len(run.steps) + 1), draws))
    for workers in (1, 2, 4):
        same = reproduced = computed = 0
        worst = 0.0
        began = time.monotonic()
        for step in steps:
            plan = plan_of(run, step, step, workers=workers, device="cpu")
            loss = compare(plan, compute(plan, Detail(first=step, last=step)).steps[-1])
            assert loss is not None
            same += loss.same
            reproduced += loss.reproduced
            worst = max(worst, loss.relative)
            computed += plan.count
        seconds = time.monotonic() - began
        good = good and reproduced == draws
        rows.append(
            f"| {'exact' if run.settings.exact else 'ordinary'} | {workers} | {same} of {draws} |"
            f" {reproduced} of {draws} | {worst:.1g} | {computed} | {seconds:.0f} |"
        )
    return rows, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "killed.py").write_text(KILLED.format(step=given.steps // 2 + 7))
        (folder / "planted.py").write_text(PLANTED)
        steps = ("--steps", str(given.steps))

        print(
            "| mode | workers | same bits | reproduced | largest relative difference | steps computed | s |"
        )
        print("|---|---|---|---|---|---|---|")
        options = ("--workers", "3", *steps, "--checkpoint-every", "10", "--max-restarts", "1")
        for mode in (["--exact"], []):
            (folder / "killed.once").unlink(missing_ok=True)
            path = train(folder, "killed.py", *options, *mode)
            restarts = sum(event.event == "resumed" for event in lockstep.runs.read(path).events)
            assert restarts == 1, "a rank was to be killed"
            rows, good = random_steps(path, chance, given.draws)
            print("\n".join(rows))
            results.append(good)

        bad = chance.randrange(1400)
        path = train(folder, "planted.py", "--workers", "2", *steps, "--set", f"bad={bad}")
        run = lockstep.runs.read(path)
        first, last = steps_of("worst", run)
        detail = Detail(first=first, last=last, samples=1)
        step = compute(plan_of(run, first, last, device="cpu"), detail).steps[-1]
        results.append(step.samples[0].index == bad)
        print(
            f"\nsample {bad} x 1e4: worst step {step.step}, its worst sample {step.samples[0].index}"
        )

        for _ in range(3):
            after = chance.randrange(1, given.steps - 1)
            path = train(
                folder, "planted.py", "--exact", "--workers", "1", *steps, "--checkpoint-every", "20",
                "--set", f"bit={chance.randrange(10**6)}", flip=after,
            )  # fmt: skip
            run = lockstep.runs.read(path)
            result = first_irreproducible(run, 1, given.steps, device="cpu", say=lambda line: None)
            named = None if result is None else result.step
            results.append(named == after + 1)
            print(f"a bit flipped after step {after}: step {named} cannot be reproduced")

        half = ("--steps", str(given.steps // 2))
        changing = ("--exact", "--workers", "2", "--checkpoint-every", "20", "--allow-changes")
        edited = train(folder, "planted.py", *changing, *half)
        text = (folder / "planted.py").read_text()
        (folder / "planted.py").write_text(text.replace("1e4", "1e3"))
        warnings = plan_of(lockstep.runs.read(edited), 5, 5, device="cpu").warnings
        results.append(any("task has changed" in warning for warning in warnings))
        print(f"the task was edited: {'; '.join(warnings)}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
