"""The stages of gpu.sh: installs, runs tests/gpu and the benchmarks of one device, and writes one
table, as JSON and as text.

Needs nothing but Python's standard library. Every stage is a command with a time limit; one that
fails, or takes too long, is a row of the table, and the next stage begins. The exit code is 1 where
any did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTING = ("hypothesis", "pytest", "pytest-randomly", "pytest-timeout")
_SHOWN = 8  # last lines of a stage that failed


@dataclass(frozen=True)
class Row:
    stage: str
    measured: str
    """What the figure is of."""
    value: str


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: float
    """Its limit."""
    command: list[str]
    rows: Callable[[Path], Iterator[tuple[str, str]]]
    """What to read in the file that the command has written."""


def stages(device: str, python: str, folder: Path) -> list[Stage]:
    """What is run after the installation. On a CPU with fewer steps: there only the script is
    tried.
    """
    steps, megabytes = ("30", "1000") if device == "cuda" else ("4", "60")

    def benchmark(name: str, seconds: float, rows: Any, *options: str, file: str = "") -> Stage:
        where = ["--device", device, "--workers", "1"] if name != "loader" else ["--device", device]
        command = [python, str(HERE / f"{name}.py"), *where, *options]
        title = file or name
        return Stage(title, seconds, [*command, "--json", str(folder / f"{title}.json")], rows)

    tests = ["-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "tests/gpu"]
    ways = "local,ddp:25,wrapper:native,stepper:native,stepper:sharded"
    return [
        Stage("tests", 90, [python, *tests, f"--junitxml={folder / 'tests.json'}"], _tests),
        benchmark(
            "against_ddp", 75, _steps, "--models", "small-mlp,cnn4,transformer", "--variants", ways,
            "--steps", steps,
        ),
        benchmark(
            "against_ddp", 50, _memory, "--models", "small-mlp", "--variants",
            "local,ddp:25,wrapper:native,stepper:native", "--steps", "3", "--memory", file="memory",
        ),
        benchmark(
            "exact", 40, _exact, "--reduce", "native", "--models", "small-mlp,cnn4",
            "--micro-batches", "4", "--steps", steps,
        ),
        benchmark("saving", 40, _saving, "--mb", megabytes, "--rounds", "3"),
        benchmark(
            "loader", 50, _loader, "--cases", "rows,images", "--workers", "0,2", "--rounds", "5",
            "--pin-memory",
        ),
    ]  # fmt: skip


def _tests(file: Path) -> Iterator[tuple[str, str]]:
    suite = ElementTree.parse(file).getroot()[0]
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped, total = int(suite.get("skipped", 0)), int(suite.get("tests", 0))
    yield "tests/gpu: passed, failed, skipped", f"{total - failed - skipped}, {failed}, {skipped}"
    for case in suite.iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            why = (problem.get("message") or "").partition("\n")[0][:100]
            yield f"FAILED {case.get('classname')}::{case.get('name')}", why


def _steps(file: Path) -> Iterator[tuple[str, str]]:
    for model in _read(file)["models"]:
        by_name = {row["variant"]: row["median"] for row in model["rows"]}
        for name, seconds in by_name.items():
            ratios = ", ".join(
                f"{seconds / by_name[other]:.3f} of {title}"
                for other, title in (("local", "the bare loop"), ("ddp:25", "DDP"))
                if other in by_name and other != name
            )
            yield f"a step of {model['task']}, {name}, median", f"{1e3 * seconds:.2f} ms, {ratios}"
        for name, why in model["left_out"].items():
            yield f"a step of {model['task']}, {name}", f"left out: {why}"


def _memory(file: Path) -> Iterator[tuple[str, str]]:
    for model in _read(file)["models"]:
        for row in model["rows"]:
            what = f"peak memory of {model['task']} ({model['gradient_mib']:.0f} MiB of gradients)"
            yield f"{what}, {row['variant']}", f"{row['peak_mib']:.1f} MiB"


def _exact(file: Path) -> Iterator[tuple[str, str]]:
    for row in _read(file)["rows"]:
        ordinary, exact = (_median(row["seconds"][way]) for way in ("ordinary", "exact"))
        what = f"a step of {row['model']}, {row['micro_batches']} micro-batches: exact / ordinary"
        yield what, f"{1e3 * exact:.2f} / {1e3 * ordinary:.2f} ms = {exact / ordinary:.3f}"


def _saving(file: Path) -> Iterator[tuple[str, str]]:
    found = _read(file)
    rounds = found["rounds"]["lockstep"]
    during, without = (
        _median([step for each in rounds for step in each[when]]) for when in ("during", "without")
    )
    what = f"a step during a save of {found['megabytes']} MB / without"
    yield what, f"{1e3 * during:.2f} / {1e3 * without:.2f} ms = {during / without:.3f}"
    for name, title in (("snapshot", "the step waits for"), ("writing", "until it is on disk")):
        yield f"a save: {title}", f"{1e3 * _median([each[name] for each in rounds]):.0f} ms"


def _loader(file: Path) -> Iterator[tuple[str, str]]:
    for row in _read(file)["rows"]:
        what = f"a micro-batch of {row['case']}, num_workers={row['workers']}, pinned"
        yield (
            f"{what}: Loader / DataLoader",
            (f"{row['ours_us']:.0f} / {row['plain_us']:.0f} us = {row['ratio']:.3f}"),
        )


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run(command: list[str], seconds: float, log: Path, **environment: str) -> str:
    """Why it failed, in the last lines that it said; "" where it did not. All that it has started
    ends with it.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:  # also where somebody has pressed Ctrl-C
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0:
        return ""
    last = log.read_text(errors="replace").splitlines()[-_SHOWN:]
    why = f"exit code {code}" if code is not None else f"not done after {seconds:.0f} s"
    return "\n".join([why, *last])


def install(where: Path, log: Path) -> str:
    """The checkout and what tests need, in a virtual environment."""
    if not (where / "bin" / "python").exists():
        venv.create(where, with_pip=True)
    wanted = ["-e", f"{HERE.parent}[tasks]", *TESTING]
    return run([str(where / "bin" / "python"), "-m", "pip", "install", *wanted], 200, log)


def text(rows: list[Row], machine: str) -> str:
    """The rows as a table in Markdown."""
    lines = [f"| {row.stage} | {row.measured} | {row.value} |" for row in rows]
    return "\n".join([machine, "", "| stage | measured | value |", "|---|---|---|", *lines, ""])


def machine_of(python: str, device: str) -> str:
    """What was measured on, in a line."""
    script = (
        "import torch; print(torch.__version__, torch.version.cuda,"
        " torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    )
    found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    told = found.stdout.strip() or "torch cannot be imported"
    return (
        f"device {device}; torch, CUDA, GPU: {told}; Python {platform.python_version()},"
        f" {os.cpu_count()} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="path of the tables, bare")
    parser.add_argument("--venv", type=Path, default=HERE.parent / ".venv-gpu")
    parser.add_argument("--stages", help="some of them, by name; default: all")
    options = parser.parse_args()
    out = options.out.absolute()
    logs = out.parent / f"{out.name}-logs"
    logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []

    def report(stage: str, began: float, why: str, found: list[tuple[str, str]]) -> None:
        took = f"{time.monotonic() - began:.0f} s"
        if why:
            found = [*found, ("FAILED", why.replace("\n", " / "))]
        rows.extend(Row(stage, *each) for each in [*found, ("the stage took", took)])
        for row in rows[-len(found) - 1 :]:
            print(f"{row.stage:<12} {row.measured}: {row.value}", flush=True)

    began = time.monotonic()
    report("install", began, failed := install(options.venv, logs / "install.log"), [])
    python = str(options.venv.absolute() / "bin" / "python")
    required = {"LOCKSTEP_REQUIRE_GPU": "1"} if options.device == "cuda" else {}
    broken = bool(failed)
    for stage in stages(options.device, python, logs) if not failed else ():
        if options.stages and stage.name not in options.stages.split(","):
            continue
        began, file = time.monotonic(), logs / f"{stage.name}.json"
        file.unlink(missing_ok=True)
        why = run(stage.command, stage.seconds, logs / f"{stage.name}.log", **required)
        found: list[tuple[str, str]] = []
        try:
            found = list(stage.rows(file)) if file.exists() else []
        except Exception as error:
            why = why or f"its result cannot be read: {type(error).__name__}: {error}"
        report(stage.name, began, why, found)
        broken = broken or bool(why)
    machine = machine_of(python, options.device)
    table = {"machine": machine, "rows": [asdict(row) for row in rows]}
    out.with_name(f"{out.name}.json").write_text(json.dumps(table, indent=1) + "\n")
    out.with_name(f"{out.name}.txt").write_text(text(rows, machine))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
