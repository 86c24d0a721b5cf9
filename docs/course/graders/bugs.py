"""Grader of the bug hunt: a script on 1, 2 and 3 ranks against the mended one on one process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grading import check, close

COURSE = Path(__file__).parents[1]
_PORT = 12355  # that teaching texts use
_SAMPLES = {"bug3": 24, "bug4": 24, "bug5": 25}  # scripts that say which samples they visit

Reports = list[dict[str, Any]]
"""What the ranks print, by rank."""


def grade_script(folder: str, name: str) -> None:
    """Grade docs/course/FOLDER/bugs/NAME.py. Raises Wrong."""
    script = COURSE / folder / "bugs" / f"{name}.py"
    (expected,) = reports(COURSE / "solutions" / "bugs" / f"{name}.py", 1)
    with ExitStack() as stack:
        if name == "bug6":  # as if a second training ran on this machine
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", _PORT))
            other.listen()
        for size in (3, 2, 1):
            case = f"On {size} ranks" if size > 1 else "On 1 rank"
            check_reports(case, name, reports(script, size), expected)
    linted = subprocess.run(
        [sys.executable, "-m", "lockstep", "lint", str(script)], capture_output=True, text=True
    )
    check(linted.returncode == 0, "The result is right. `lockstep lint` still names a mistake.")


def reports(script: Path, size: int) -> Reports:
    """Run a script on ranks, and return what each has printed. Raises Wrong if it fails."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "lockstep", "run", "--workers", str(size)]
        command += ["--stall-after", "5", "--log", logs, str(script)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        check(ended.returncode == 0, f"The script fails on {size} ranks: {last}")
        found = []
        for rank in range(size):
            printed = Path(logs, f"rank-{rank}.log").read_text().splitlines()
            found.append(json.loads(next(line for line in printed if line.startswith("{"))))
    return found


def check_reports(case: str, name: str, found: Reports, expected: dict[str, Any]) -> None:
    for rank, report in enumerate(found):
        check(
            close(report["weights"], found[0]["weights"], 1e-6),
            f"{case} rank {rank} ends with other weights than rank 0.",
        )
    if name in _SAMPLES:
        check_samples(case, _SAMPLES[name], found)
    if name != "bug5":  # it repeats samples, so each number of ranks has its own result
        check(
            close(found[0]["weights"], expected["weights"], 1e-4),
            f"{case} the weights are not those that one process trains.",
        )
    if "loss" in expected:
        loss = found[0].get("loss")
        check(
            loss is not None and close(loss, expected["loss"], 1e-4),
            f"{case} rank 0 reports the loss {loss}. One process reports {expected['loss']}.",
        )


def check_samples(case: str, count: int, found: Reports) -> None:
    epochs = [report["samples"] for report in found]
    for epoch, parts in enumerate(zip(*epochs, strict=True)):
        visited = {sample for part in parts for sample in part}
        check(
            visited == set(range(count)),
            f"{case} epoch {epoch} visits {len(visited)} of {count} samples.",
        )
        check(
            len({len(part) for part in parts}) == 1,
            f"{case} the ranks visit {[len(part) for part in parts]} samples in epoch {epoch}. Repeat "
            "samples until all ranks have equally many (lesson 4).",
        )
    check(
        count == 25 or epochs[0][0] != epochs[0][1],
        f"{case} the first two epochs have the same order on rank 0.",
    )
