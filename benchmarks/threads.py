"""Do the threads of one worker fit the host? Seconds of `lockstep train digits` on an idle host, beside
busy loops on every core, and in a control group with the time of one core.

    python benchmarks/threads.py

The variants take turns. "two threads": OMP_NUM_THREADS=2. The control group is one of version 1,
which root makes; without it that row is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
_GROUP = Path("/sys/fs/cgroup/cpu/lockstep-threads")


@contextmanager
def busy(count: int) -> Iterator[Sequence[str]]:
    """Run that many busy loops."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield ()
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def one_core() -> Iterator[Sequence[str]]:
    """Yield words that start a command in a control group with the time of one core."""
    _GROUP.mkdir()
    try:
        period = (_GROUP / "cpu.cfs_period_us").read_text()
        (_GROUP / "cpu.cfs_quota_us").write_text(period)
        yield "sh", "-c", f'echo $$ > {_GROUP}/cgroup.procs; exec "$@"', "sh"
    finally:
        _GROUP.rmdir()


def seconds(start: Sequence[str], variables: Mapping[str, str], steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = [sys.executable, "-m", "lockstep", "train", "digits", f"--steps={steps}", "--run"]
        subprocess.run(
            [*start, *words, str(run)],
            env={**os.environ, **variables},
            check=True,
            capture_output=True,
        )
        return float(json.loads((run / "result.json").read_text())["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    places: dict[str, Callable[[], AbstractContextManager[Sequence[str]]]] = {
        "idle": lambda: nullcontext(()),
        "beside busy loops": lambda: busy(os.cpu_count() or 1),
        "in a group of one core": one_core,
    }
    if not os.access(_GROUP.parent, os.W_OK):
        del places["in a group of one core"]
    print(f"{'':24}" + "".join(f"{name:>14}" for name in VARIANTS) + "   as it is / one thread")
    for place, inside in places.items():
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(asked.rounds):
            for name, variables in VARIANTS.items():
                with inside() as start:
                    found[name].append(seconds(start, variables, asked.steps))
        middle = {name: median(values) for name, values in found.items()}
        row = "".join(f"{value:12.1f} s" for value in middle.values())
        ratio = middle["as it is"] / middle["one thread"]
        print(f"{place:24}{row}   {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
