"""What `lockstep plan` foretells beside what is measured: step times on slow links, and where the
link takes over.

    sudo python benchmarks/plan.py --rates 100mbit,1gbit --rounds 3
    sudo python benchmarks/plan.py --knee --rounds 1

Prediction and measurement take turns, model by model, so that what else the machine does falls on
both: in every round a profile of so many seconds, then a training of so many steps on 2 and on 4
ranks. The prediction is that of the median profile; the measurement the median over rounds of a
training's median step, full steps only, the first ten left out. Nothing is fitted to a training:
links have their nominal rate. Hosts are network namespaces (namespaces.py), which share the
machine's cores: their ranks compute as if side by side on one host. The knee is the highest rate,
halved from line to line, at which a step takes more than twice what it takes on a link without a
limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import namespaces
from lockstep.config.knob import pairs
from lockstep.config.task import Task
from lockstep.runtime.cores import cores
from lockstep.schedules.network import Network
from lockstep.tools.plan.forecast import simulate
from lockstep.tools.plan.networks import connection
from lockstep.tools.plan.profile import Profile, profile
from lockstep.tools.plan.work import PlanScaling, work_of
from lockstep.training.resolve import locate, resolve

_SKIPPED = 10  # steps of a training
_FREE = "free"  # a network: no limit but the cores


@dataclass(frozen=True, slots=True)
class Model:
    """A task, and for how many steps it is trained."""

    name: str
    task: str
    set: tuple[str, ...]
    steps: int

    def source(self) -> Callable[[], Task]:
        return partial(resolve, locate(self.task), pairs(self.set, "--set"))

    def words(self) -> list[str]:
        """The task on the command line."""
        return [self.task, *(word for each in self.set for word in ("--set", each))]


MODELS = (
    Model("digits", "digits", ("epochs=1000",), 200),
    Model("text", "text", ("train_bytes=200000", "eval_bytes=4096", "epochs=1000"), 50),
    Model("mlp", str(Path(__file__).with_name("plan_mlp.py")), (), 50),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model, number of ranks and network. Milliseconds."""

    model: str
    workers: int
    network: str
    predicted: float
    measured: float
    """The median over the rounds."""
    rounds: Sequence[float]
    limiting: str

    @property
    def error(self) -> float:
        """Of the prediction, over what was measured."""
        return self.predicted / self.measured - 1


def steps_of(run: Path) -> list[float]:
    """Milliseconds of the full steps of a run, the first ones left out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    samples = [sum(row["samples_by_rank"]) for row in steps]
    full = [
        1e3 * count / row["samples_per_s"]
        for count, row in zip(samples, steps, strict=True)
        if count == max(samples)
    ]
    return full[_SKIPPED:]


Train = Callable[[Model, int], float]


def _lengths(model: Model, run: Path) -> list[str]:
    return [
        "--steps",
        str(model.steps),
        "--checkpoint-every",
        str(model.steps + 1),
        "--run",
        str(run),
    ]


@contextmanager
def trainer_on_hosts(workers: int, rate: str | None) -> Iterator[Train]:
    """Trains on so many hosts with such a link, a rank each."""
    with (
        namespaces.hosts(workers, rate) as hosts,
        tempfile.TemporaryDirectory(prefix="plan-") as folder,
    ):
        yield partial(_trained_on, hosts, Path(folder))


def _trained_on(hosts: list[namespaces.Host], scratch: Path, model: Model, workers: int) -> float:
    assert workers == len(hosts)
    run = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        *model.words(),
        "--device",
        "cpu",
        *_lengths(model, run),
    ]
    ranks: list[subprocess.Popen[bytes]] = []
    for number, host in enumerate(hosts):
        environment = namespaces.variables_of(number, hosts)
        ranks.append(host.start(words, environment=environment, log=str(scratch / f"log-{number}")))
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        sys.exit(f"{model.name} on {workers} hosts: {(scratch / 'log-0').read_text()[-2000:]}")
    return statistics.median(steps_of(run))


def profiled(model: Model, scaling: PlanScaling, counts: Sequence[int], seconds: float) -> Profile:
    source = model.source()
    task = source()
    slots = -(-task.global_batch // task.micro_batch)
    sides = scaling.sides(counts, slots, cores())
    talking = scaling.messages(counts)
    return profile(source, sides, seconds, "cpu", cores=cores(), talking=talking)


def middle(profiles: Sequence[Profile]) -> Profile:
    """The profile whose figures are the medians over the rounds."""
    sides = {}
    for ranks, side in profiles[0].sides.items():
        medians = {}
        for name in ("forward", "backward", "optimizer", "other", "loading", "spread"):
            medians[name] = statistics.median(
                getattr(profile.sides[ranks], name) for profile in profiles
            )
        sides[ranks] = replace(side, **medians)
    messages = {}
    for ranks in profiles[0].messages:
        messages[ranks] = statistics.median(profile.messages[ranks] for profile in profiles)
    return replace(profiles[0], sides=sides, messages=messages)


def compare(
    model: Model,
    count: int,
    rounds: int,
    seconds: float,
    rate: str,
    network: Network,
    train: Train,
) -> Row:
    """Profiles and trainings in turns."""
    scaling = PlanScaling(base=count, per_host=count)
    profiles: list[Profile] = []
    measured: list[float] = []
    for _ in range(rounds):
        profiles.append(profiled(model, scaling, [count], seconds))
        measured.append(train(model, count))
    step = simulate(work_of(middle(profiles), scaling, count), count, network)
    return Row(
        model=model.name,
        workers=count,
        network=rate,
        predicted=1e3 * step.step,
        measured=statistics.median(measured),
        rounds=measured,
        limiting=step.limiting,
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'model':<8}{'workers':>8} "
        f" {'network':<10}{'predicted':>12}{'measured':>12}{'error':>8} "
        " rounds"
    ]
    for row in rows:
        rounds = ", ".join(f"{each:.1f}" for each in row.rounds)
        lines.append(
            f"{row.model:<8}{row.workers:>8}  {row.network:<10}{row.predicted:>9.1f}"
            f" ms{row.measured:>9.1f} ms{100 * row.error:>+7.0f} %  {rounds}"
        )
    return "\n".join(lines)


def on_links(options: argparse.Namespace, rates: Sequence[str]) -> list[Row]:
    """Hosts with a link of each rate."""
    rows = []
    for model in options.models:
        for rate in rates:
            network = connection(rate if rate == _FREE else f"{options.latency:g},{rate}")
            for count in options.workers:
                with trainer_on_hosts(count, None if rate == _FREE else rate) as train:
                    row = compare(
                        model, count, options.rounds, options.seconds, rate, network, train
                    )
                    rows.append(row)
            print(table(rows[-len(options.workers) :]), flush=True)
    return rows


def knee(options: argparse.Namespace, model: Model) -> list[Row]:
    """On ever slower links, until every step takes more than twice what it takes on one without
    a limit.
    """
    options = argparse.Namespace(**vars(options) | {"models": [model]})
    rows = on_links(options, [_FREE])
    unlimited = {row.workers: row for row in rows}
    knees: dict[tuple[int, str], str] = {}
    for power in range(7):
        rows += on_links(options, [f"{1000 / 2**power:g}mbit"])
        for row in rows[-len(options.workers) :]:
            for told in ("predicted", "measured"):
                if getattr(row, told) > 2 * getattr(unlimited[row.workers], told):
                    knees.setdefault((row.workers, told), row.network)
        if len(knees) == 2 * len(options.workers):
            break
    for count, row in unlimited.items():
        for told in ("predicted", "measured"):
            first = (
                f"from {knees[count, told]} on"
                if (count, told) in knees
                else "at none of these rates"
            )
            print(
                f"{model.name}, {count} ranks, {told}: more than twice the {getattr(row, told):.0f}"
                f" ms of a link without a limit {first}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", help="hosts with links of these rates, such as 100mbit,1gbit")
    parser.add_argument(
        "--knee", action="store_true", help="hosts with links from 1gbit down, until they take over"
    )
    parser.add_argument("--models", default="digits,text,mlp")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of a profile")
    parser.add_argument(
        "--latency",
        type=float,
        default=100,
        help="of a message, in microseconds; the links have a rate and no delay",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.models = [
        model for name in options.models.split(",") for model in MODELS if model.name == name
    ]
    options.workers = [int(count) for count in options.workers.split(",")]
    print(f"load of this machine with {cores()} cores before: {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[Row] = []
    if (options.rates or options.knee) and (reason := namespaces.why_not()):
        print(f"links are skipped: {reason}")
    else:
        rows += on_links(options, options.rates.split(",")) if options.rates else []
        rows += (
            [row for model in options.models for row in knee(options, model)]
            if options.knee
            else []
        )
    print(table(rows))
    if options.json:
        options.json.write_text(
            json.dumps([asdict(row) | {"error": row.error} for row in rows], indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
