"""What a slow link costs, and what each method gives for it: bytes, time a step, time to a result,
and the result.

    sudo python benchmarks/slow_link.py --rate 100mbit --workers 4 --steps 600 --json slow.json
    sudo python benchmarks/slow_link.py --rate 100mbit --collectives --workers 2,3,4

Every rank has a host of its own: a network namespace of this machine, with a link of that rate,
both ways, to one switch (namespaces.py). The hosts share the machine's cores, so computation is
slower than on real hosts and a link looks better than it is.

Each method trains the same task, from the same start, on the same samples, for the same number of
steps; evaluations, which are the same for all, are left out of times and bytes. The baseline is
torch's DistributedDataParallel (gradients views of its buckets, the bucket size that was quickest
in a short trial). All have a fused optimizer and one intra-op thread a rank. "sent" is what the
interface of the rank that sends most counted, with headers and acknowledgements, a step; "by us" is
Lockstep's own count. The target is the baseline's last metric, less 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import namespaces

METHODS = (
    "native; --compress bf16; --compress fp16; --compress int8; --compress powersgd:4;"
    " --sync-every 10; --sync-every 5 --compress int8; --sync-every 50; --sync-every 50"
    " --outer nesterov; --update server; central"
)
REDUCE = "native,ring,central"
WARM_UP = 5
WITHIN = 0.02
TRIAL = 12
BASELINE = "torch DDP"
RANK = Path(__file__).with_name("slow_link_rank.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one method did. Seconds and bytes are of steps alone."""

    method: str
    steps: int = 0
    sent: float | None = None
    """Bytes a step at the interface, mean of all steps after the first ones; the rank that sends
    most.
    """
    counted: float | None = None
    """The same, counted by Lockstep."""
    median: float | None = None
    """Seconds a step on rank 0."""
    mean: float | None = None
    """The same, which counts synchronizations that are far apart."""
    curve: Sequence[tuple[float, float]] = ()
    """(seconds of training so far, metric) at every evaluation."""
    problem: str | None = None

    @property
    def final(self) -> float | None:
        return self.curve[-1][1] if self.curve else None


def options_of(method: str) -> list[str]:
    """The options of `lockstep train` that a method is: a bare word is a way to sum, as in
    `native`. Raises ValueError.
    """
    words = shlex.split(method)
    if not words:
        raise ValueError(
            "--methods: a method is empty; write them as `native; --compress bf16; --sync-every 50"
            " --outer nesterov`"
        )
    return words if words[0].startswith("-") else ["--reduce", *words]


def methods_of(text: str) -> list[str]:
    """`a; b; c`, each once. Raises ValueError."""
    found = [" ".join(part.split()) for part in text.split(";") if part.strip()]
    for method in found:
        options_of(method)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--methods {text!r}: name at least one, and each once")
    return found


def found_in(
    method: str, notes: Sequence[Sequence[Mapping[str, Any]]], warm_up: int = WARM_UP
) -> Found:
    """What the notes of all ranks, rank 0's first, say."""
    metric = next(each["metric"] for each in notes[0] if each["kind"] == "task")
    seconds: list[float] = []
    sent, counted, curve = [], [], []
    for rank, lines in enumerate(notes):
        before: Mapping[str, Any] | None = None
        bytes_here: list[float] = []
        counts: list[Any] = []
        for line in lines:
            if line["kind"] == "step":
                if before is not None:
                    bytes_here.append(line["tx"] - before["tx"])
                    counts.append(line["sent"])
                    if rank == 0:
                        seconds.append(line["at"] - before["at"])
                before = line
            elif line["kind"] == "met" and before is not None:
                bytes_here[-1] += line["tx"] - before["tx"]
                counts[-1] += line["sent"]
                if rank == 0:
                    seconds[-1] += line["at"] - before["at"]
                before = line
            elif line["kind"] == "evaluate":
                before = line
                if rank == 0:
                    curve.append((sum(seconds), float(line["metrics"][metric])))
        sent.append(statistics.fmean(bytes_here[warm_up:]))
        counted.append(None if None in counts else statistics.fmean(counts[warm_up:]))
    return Found(
        method=method,
        steps=sum(line["kind"] == "step" for line in notes[0]),
        sent=max(sent),
        counted=None if None in counted else max(each for each in counted if each is not None),
        median=statistics.median(seconds[warm_up:]),
        mean=statistics.fmean(seconds[warm_up:]),
        curve=curve,
    )


def time_to(target: float, mode: str, found: Found) -> float | None:
    """Seconds of training until an evaluation was there; None where none was."""
    sign = 1 if mode == "min" else -1
    return next(
        (seconds for seconds, metric in found.curve if sign * metric <= sign * target), None
    )


def target_of(baseline: Found, mode: str) -> float:
    assert baseline.final is not None
    return baseline.final * (1 + WITHIN if mode == "min" else 1 - WITHIN)


def table(every: Sequence[Found], metric: str, mode: str) -> str:
    """A line a method, the baseline first."""
    baseline = every[0]
    target = target_of(baseline, mode) if baseline.final is not None else None
    lines = [
        f"{'method':<34}{'sent a step':>13}{'by us':>11}{'median':>11}{'mean':>11}{'DDP / it':>10}{'to target':>11}{'DDP / it':>10}"
        f"  {metric}"
    ]
    reached = None if target is None else time_to(target, mode, baseline)
    for found in every:
        if found.problem is not None:
            lines.append(f"{found.method:<34} left out: {found.problem}")
            continue
        assert found.sent is not None
        assert found.median is not None
        assert found.mean is not None
        quick = "" if baseline.mean is None else f"{baseline.mean / found.mean:.2f}"
        seconds = None if target is None else time_to(target, mode, found)
        to_target = "never" if seconds is None else f"{seconds:.1f} s"
        sooner = "" if not seconds or not reached else f"{reached / seconds:.2f}"
        by_us = "" if found.counted is None else f"{found.counted / 1e6:.3f} MB"
        lines.append(
            f"{found.method:<34}{found.sent / 1e6:>10.3f} MB{by_us:>11}{1e3 * found.median:>8.1f}"
            f" ms{1e3 * found.mean:>8.1f} ms{quick:>10}{to_target:>11}{sooner:>10} "
            f" {'' if found.final is None else f'{found.final:.4f}'}"
        )
    if target is not None:
        lines.append(
            f"target: {metric} {'<=' if mode == 'min' else '>='} {target:.4f}, the baseline's last,"
            f" less {100 * WITHIN:g} %"
        )
    return "\n".join(lines)


class Bench:
    """Starts trainings on hosts, and reads their notes."""

    def __init__(
        self, hosts: list[namespaces.Host], options: argparse.Namespace, scratch: Path
    ) -> None:
        self.hosts, self.options, self.scratch = hosts, options, scratch
        self._runs = 0

    def ddp(self, megabytes: float, steps: int) -> Found:
        words = [str(RANK), "ddp", "--steps", str(steps), "--bucket-mb", str(megabytes)]
        return self._train(f"{BASELINE}, buckets of {megabytes:g} MB", words)

    def lockstep(self, method: str) -> Found:
        run = self.scratch / f"run-{self._runs}"
        steps = str(self.options.steps)
        words = [
            "-m",
            "lockstep",
            "train",
            str(RANK),
            "--device",
            "cpu",
            "--run",
            str(run),
            "--steps",
            steps,
            *options_of(method),
        ]
        return self._train(method, [*words, "--checkpoint-every", str(self.options.steps + 1)])

    def _train(self, method: str, words: list[str]) -> Found:
        folder, problem = self.start(words)
        if problem is not None:
            return Found(method=method, problem=problem)
        files = [folder / f"notes-{rank}.jsonl" for rank in range(len(self.hosts))]
        return found_in(
            method, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        )

    def start(self, words: list[str]) -> tuple[Path, str | None]:
        """Run one command on all hosts, a rank each: where its notes are, and what went wrong."""
        folder = self.scratch / f"notes-{self._runs}"
        folder.mkdir()
        self._runs += 1
        given = {
            "task": self.options.task,
            "set": overrides_of(self.options.set),
            "notes": str(folder),
            "interface": namespaces.INTERFACE,
        }
        ranks = []
        for rank, host in enumerate(self.hosts):
            environment = namespaces.variables_of(rank, self.hosts)
            environment["LOCKSTEP_SLOW_LINK"] = json.dumps(given)
            ranks.append(
                host.start(
                    [sys.executable, *words],
                    environment=environment,
                    log=str(folder / f"log-{rank}"),
                )
            )
        return folder, self._wait(ranks, folder)

    def _wait(self, ranks: list[subprocess.Popen[bytes]], folder: Path) -> str | None:
        """None where all ended well; else the last line of the first that did not."""
        deadline = time.monotonic() + self.options.timeout
        problem = None
        while problem is None and any(rank.poll() is None for rank in ranks):
            failed = [number for number, rank in enumerate(ranks) if rank.poll()]
            if failed:
                time.sleep(2)  # for what it has to say, and for the others
                problem = next((_last_line(folder / f"log-{number}") for number in failed), "")
            elif time.monotonic() > deadline:
                problem = f"not over after {self.options.timeout:g} s"
            time.sleep(0.1)
        for number, rank in enumerate(ranks):
            if rank.poll() is None:
                rank.kill()
            if rank.wait() and problem is None:
                problem = _last_line(folder / f"log-{number}")
        return problem

    def said(self) -> dict[str, Any]:
        """The task's metric, and whether less of it is better, as the first rank that got so far
        has noted.
        """
        for file in sorted(self.scratch.glob("notes-*/notes-0.jsonl")):
            for line in file.read_text().splitlines():
                found: dict[str, Any] = json.loads(line)
                return found
        return {"metric": "loss", "mode": "min"}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "it ended without a word"


def overrides_of(pairs: Sequence[str]) -> dict[str, str]:
    """["a=1"], as --set has them."""
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def trainings(options: argparse.Namespace) -> dict[str, Any]:
    """Every method on hosts of one rate."""
    methods = methods_of(options.methods)
    (workers,) = map(int, options.workers.split(","))
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-slow-") as scratch,
        namespaces.hosts(workers, options.rate) as hosts,
    ):
        bench = Bench(hosts, options, Path(scratch))
        sizes = [float(size) for size in options.ddp_buckets.split(",")]
        tried = {size: bench.ddp(size, TRIAL + WARM_UP) for size in sizes} if len(sizes) > 1 else {}
        best = min(
            (size for size in tried if tried[size].median),
            key=lambda size: tried[size].median or 0.0,
            default=sizes[0],
        )
        every = []
        for method in [None, *methods]:
            every.append(
                bench.ddp(best, options.steps) if method is None else bench.lockstep(method)
            )
            print(
                f"  {every[-1].method}: {every[-1].problem or f'{every[-1].mean:.3f} s a step'}",
                file=sys.stderr,
                flush=True,
            )
        said = bench.said()
    setting = (
        f"{options.task}{''.join(f' {pair}' for pair in options.set)}, {workers} hosts of one rank,"
        f" {options.rate}, {options.steps} steps"
    )
    print(f"{setting}; load of this machine with {os.cpu_count()} cores before: {options.load:.1f}")
    print(table(every, said["metric"], said["mode"]))
    return {
        "metric": said["metric"],
        "mode": said["mode"],
        "rows": [asdict(found) for found in every],
    }


def sums(options: argparse.Namespace) -> dict[str, Any]:
    """Sums of gradients alone, by every reduction, for several numbers of ranks."""
    reduce, rows = options.reduce.split(","), []
    for workers in map(int, options.workers.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="lockstep-slow-") as scratch,
            namespaces.hosts(workers, options.rate) as hosts,
        ):
            out = Path(scratch, "sums.json")
            words = [
                str(RANK),
                "sums",
                "--reduce",
                options.reduce,
                "--steps",
                str(options.steps),
                "--out",
                str(out),
            ]
            _, problem = Bench(hosts, options, Path(scratch)).start(words)
            if problem is not None:
                sys.exit(f"{workers} ranks: {problem}")
            rows.append({"workers": workers, **json.loads(out.read_text())})
    mib = 4 * rows[0]["elements"] / 1e6
    print(
        f"sum of the gradients of {options.task} ({mib:.2f} MB), hosts of one rank, {options.rate},"
        f" median of {options.steps} in turns;"
    )
    print(f"load of this machine with {os.cpu_count()} cores before: {options.load:.1f}")
    print(f"{'ranks':<7}" + "".join(f"{name:>12}{'MB sent':>10}" for name in reduce))
    for row in rows:
        cells = (
            f"{1e3 * statistics.median(row['seconds'][name]):>9.0f}"
            f" ms{row['sent'][name] / 1e6:>10.2f}"
            for name in reduce
        )
        print(f"{row['workers']:<7}" + "".join(cells))
    return {"sums": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate",
        default="100mbit",
        help="of every host's link, both ways: 10mbit to 1gbit, as tc writes it",
    )
    parser.add_argument(
        "--workers", help="hosts, one rank each; default 4, with --collectives 2,3,4"
    )
    parser.add_argument("--task", default="text")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a parameter of task(); may be repeated",
    )
    parser.add_argument(
        "--steps", type=int, help="default 600; with --collectives sums of each, default 7"
    )
    parser.add_argument(
        "--methods",
        default=METHODS,
        help="options of `lockstep train`, methods split by semicolons",
    )
    parser.add_argument("--ddp-buckets", default="1,5,25", help="MB that are tried for torch's DDP")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="time sums of gradients only, for several numbers of ranks",
    )
    parser.add_argument("--reduce", default=REDUCE, help="with --collectives: the ways to sum")
    parser.add_argument(
        "--timeout", type=float, default=3600, help="seconds that one training may take"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.workers = options.workers or ("2,3,4" if options.collectives else "4")
    options.steps = options.steps or (7 if options.collectives else 600)
    try:
        namespaces.bits_per_second(options.rate)
        methods_of(options.methods)
    except ValueError as error:
        parser.error(str(error))
    if reason := namespaces.why_not():
        print(f"skipped: {reason}")
        return
    # so that no host is left behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options.load = os.getloadavg()[0]
    found = sums(options) if options.collectives else trainings(options)
    if options.json:
        setting = {
            "task": options.task,
            "set": overrides_of(options.set),
            "rate": options.rate,
            "workers": options.workers,
        }
        options.json.write_text(
            json.dumps({**setting, "steps": options.steps, "load": options.load, **found}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
