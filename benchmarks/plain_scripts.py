"""Plain scripts of torch.distributed under `lockstep run`: how soon a hang is named, and what the
recording of their calls costs.

    python -m benchmarks.plain_scripts                       the twelve hangs of tests/cases/test_hangs.py
    python -m benchmarks.plain_scripts --turns 80            the cost

Hangs: from the end of a script's common beginning (the process group is open) to the line that names
rank and place, less `--stall-after`. Exits with 1 where one is later than 5 s, or names it wrong.

Cost: torch's own DDP on 2 ranks, by turns with the functions that note and with torch's own. A step
has a forward, a backward, an all-reduce of the loss and AdamW's step. Rank 0's time, the 25th
percentile over the turns. The thread that looks at native code runs in both: its processor time is
told beside.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median, quantiles
from types import FunctionType
from typing import Any

QUIET = 2.0  # seconds, in place of thirty
LATE = 5.0
LAUNCH = [sys.executable, "-m", "lockstep", "run"]
SECONDS = 0.3  # of a turn
MODELS = ("cnn", "small-mlp")


# -- hangs ---------------------------------------------------------------------------------------


def hang(name: str, folder: Path) -> tuple[bool, float]:
    """Whether it is named right, and after how many seconds."""
    from tests.cases.test_hangs import HANGS, START, sentence

    each = HANGS[name]
    began = f"open({str(folder)!r} + f'/began-{{rank}}', 'w').write(str(time.monotonic()))"
    # in the last line of the beginning: lines keep their numbers
    (folder / "script.py").write_text(f"{START.rstrip()}; {began}\n{each.script}")
    command = [*LAUNCH, "--workers", str(each.workers), "--stall-after", str(QUIET), "script.py"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        told, right = 0.0, False
        for line in process.stderr:
            if line.startswith("STALL"):
                told, right = time.monotonic(), bool(re.search(sentence(each), line))
    last = max(float(file.read_text()) for file in folder.glob("began-*"))
    return right and process.returncode == each.code, told - last


def hangs() -> int:
    from tests.cases.test_hangs import HANGS

    found = {}
    for name in HANGS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = hang(name, Path(folder))
        right, seconds = found[name]
        late = seconds - QUIET
        print(f"{name:<45}{'right' if right else 'WRONG':>6}{late:>6.1f} s", flush=True)
    after = [seconds - QUIET for _, seconds in found.values()]
    count = sum(right and seconds - QUIET <= LATE for right, seconds in found.values())
    print(
        f"{count} of {len(found)} right; told {median(after):.1f} s after --stall-after, at most"
        f" {max(after):.1f} s"
    )
    return int(count != len(found))


# -- cost ----------------------------------------------------------------------------------------


def recorded() -> list[tuple[Any, str, Any]]:
    """Torch's functions that are recorded: where they are found, name, and what stands there."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    found = [
        (place, name, vars(place)[name])
        for place, names in ((c10d, c10d.__all__), (dist, c10d.__all__), (dist.Work, ["wait"]))
        for name in names
        if type(vars(place).get(name)) is FunctionType and hasattr(vars(place)[name], "__wrapped__")
    ]
    assert len(found) > 1, "nothing is recorded here"
    return found


def processor_seconds() -> float:
    """Of the thread that looks at native code."""
    (thread,) = (each for each in threading.enumerate() if each.name == "lockstep-native")
    file = Path(f"/proc/self/task/{thread.native_id}/schedstat")
    return int(file.read_text().split()[0]) / 1e9


def rank(model: str, turns: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from cases import CASES, loss, optimizer

    dist.init_process_group("gloo")
    functions, case = recorded(), CASES[model]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    updates = optimizer(ddp)
    batch = case.samples(case.batch, torch.Generator().manual_seed(dist.get_rank()))

    def turn(steps: int, *, noted: bool) -> float:
        """Seconds a step."""
        for place, name, function in functions:
            setattr(place, name, function if noted else function.__wrapped__)
        begin = time.perf_counter()
        for _ in range(steps):
            updates.zero_grad()
            value = loss(ddp(batch[0]), batch)[0]
            value.backward()
            dist.all_reduce(value.detach())
            updates.step()
        return (time.perf_counter() - begin) / steps

    turn(20, noted=True)
    count = torch.tensor(max(1, round(SECONDS / turn(20, noted=False))))
    dist.broadcast(count, 0)
    taken: dict[bool, list[float]] = {False: [], True: []}
    used, begin = processor_seconds(), time.perf_counter()
    for number in range(turns):
        for noted in (False, True) if number % 2 else (True, False):
            taken[noted].append(turn(int(count), noted=noted))
    used = (processor_seconds() - used) / (time.perf_counter() - begin)
    if dist.get_rank() == 0:
        quarters = [1000 * quantiles(taken[noted], n=4)[0] for noted in (False, True)]
        pairs = [b / a - 1 for a, b in zip(taken[False], taken[True], strict=True)]
        print(
            f"{model}, {turns} turns of {int(count)} steps: a step {quarters[0]:.2f} ms, noted"
            f" {quarters[1]:.2f} ms: {quarters[1] / quarters[0] - 1:+.2%}; median of the pairs"
            f" {median(pairs):+.2%}; the thread uses {used:.2%} of a processor",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, help="of each of the two")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    if not options.turns:
        return hangs()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for model in options.models.split(","):
        command = [*LAUNCH, "--workers", "2", __file__, "rank", model, str(options.turns)]
        subprocess.run(command, env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
