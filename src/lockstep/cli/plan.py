"""`lockstep plan`: predict the time of a step on ranks and a network that need not exist.

plan TASK                        profile a rank here, and simulate its step
plan --gradient-mb N --step-ms N plan a step from these numbers, measuring nothing
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.arguments import task_of
from lockstep.cli.choices import RunChoice
from lockstep.cli.completion import tasks
from lockstep.cli.options import GivenNames, Only, option_name
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.parallelism import Parallelism
from lockstep.config.settings import Settings
from lockstep.errors import UsageError
from lockstep.runtime.cores import cores, warn_if_busy
from lockstep.tools.timing.output_files import check_writable, write_json

if TYPE_CHECKING:
    from lockstep.config.task import Task
    from lockstep.tools.plan.profile import Profile
    from lockstep.tools.plan.work import PlanScaling

MOST = 4096  # ranks
_ONLY_OF_TASK = {"task", "weak", "seconds", "overrides"}
_ONLY_OF_NUMBERS = {"gradient_mb", "step_ms", "buckets"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """The options of a plan, without the task and the method. Raises UsageError for values that
    cannot work.
    """

    workers: Annotated[
        str, Knob("run", unit="N|N,N|N..N", flags=("--workers", "-n"), common=True)
    ] = "1,2,4,8"
    """Numbers of ranks: one (512), a list (1,2,4), or powers of two (1..4096)."""
    network: Annotated[str, Knob("cluster", unit="NAME|US,RATE", common=True)] = "1Gbit"
    """Network between nodes: 100Mbit, 1Gbit, 10Gbit, 25GbE, 100GbE, free, or latency,rate
    (500,50Mbit).
    """
    nodes_of: Annotated[int, Knob("cluster", unit="N", least=1, common=True)] = 1
    """Number of ranks on a node, which share its network and its cores."""
    weak: Annotated[
        bool, Knob("training", flags=("--weak/--strong",), default="strong", common=True)
    ] = False
    """Keep the batch of each rank (weak), or the global batch (strong)."""
    seconds: Annotated[float, Knob("measurement", unit="SECONDS", above=0, common=True)] = 30.0
    """Seconds to profile each rank, excluding warm-up."""
    gradient_mb: Annotated[float | None, Knob("run", unit="MB", above=0, common=True)] = None
    """Plan a step with this many megabytes of gradients, in place of a task (with --step-ms)."""
    step_ms: Annotated[float | None, Knob("run", unit="MS", above=0, common=True)] = None
    """Milliseconds of computation of a rank in a step (with --gradient-mb)."""
    buckets: Annotated[int, Knob("run", unit="N", least=1)] = 1
    """Number of equal gradient buckets (with --gradient-mb)."""
    json_file: Annotated[Path | None, Knob("run", unit="FILE", flags=("--json",))] = None
    """Also write the result to FILE as JSON."""

    def __post_init__(self) -> None:
        knob.check(self)


def plan(
    options: PlanChoice,
    method: Annotated[Parallelism, Only("reduce", "compress", "update", "sync_every")],
    choice: Annotated[RunChoice, Only("overrides")],
    names: GivenNames,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            autocompletion=tasks,
            help="Bundled task (digits, text), or a Python file whose task() returns a lockstep.Task.",
        ),
    ] = None,
) -> None:
    """Predict the step time of TASK at any number of workers.

    It first profiles one rank of the task on this host: the phases of a step, and when each gradient
    bucket is complete. Then it simulates the step: buckets cross the network one after the other, and
    ranks wait for the slowest one. With --gradient-mb and --step-ms it measures nothing.

    \b
    Examples:
      lockstep plan digits --workers 1..64           1 to 64 ranks, on 1 Gbit/s
      lockstep plan my_task.py -n 8 --network 25GbE  8 ranks, on another network
      lockstep plan --gradient-mb 100 --step-ms 250  a step of which two numbers are known
    """
    if task is None and options.gradient_mb is None:
        raise UsageError(
            "option-missing",
            option="lockstep plan",
            needed="a TASK or --gradient-mb",
            reason="it predicts the steps of digits, text, a Python file, or of given numbers",
        )
    if options.gradient_mb is None:
        _refuse(names & _ONLY_OF_NUMBERS, "the plan of a task")
    else:
        _refuse(names & _ONLY_OF_TASK, "--gradient-mb")
        if options.step_ms is None:
            raise UsageError(
                "option-missing",
                option="--gradient-mb",
                needed="--step-ms MS",
                reason="a step is the computation and the communication of its gradients",
            )
    counts = counts_of(options.workers)
    check_writable(options.json_file, "--json")
    located = None if task is None else task_of(task, choice.overrides)
    from lockstep.tools.plan.networks import connection, described

    network = connection(options.network, options.nodes_of)
    # these import torch
    from lockstep.tools.plan.forecast import check_method, describe, forecasts
    from lockstep.tools.plan.work import PlanScaling, given_work, work_of
    from lockstep.training.resolve import resolve

    settings = Settings(task="plan", **knob.values_of(method, Parallelism))
    check_method(settings)
    report: dict[str, Any] = {"network": described(network, options.network)}
    if options.gradient_mb is not None and options.step_ms is not None:
        given = given_work(options.gradient_mb, options.buckets, options.step_ms)
        rows = forecasts(lambda workers: given, counts, 1, network, settings)
        sizes = f"{options.gradient_mb:g} MB of gradients in {options.buckets} equal buckets"
        lines = [report["network"], f"{sizes}; every rank computes {options.step_ms:g} ms"]
        notes: list[str] = []
    elif located is not None:
        base = counts[0] if len(counts) > 1 else 1
        scaling = PlanScaling(base=base, weak=options.weak, per_host=options.nodes_of)
        measured = _profiled(partial(resolve, *located), scaling, counts, options.seconds)
        of_profile = partial(work_of, measured, scaling)
        rows = forecasts(of_profile, counts, base, network, settings)
        lines = [measured.describe(options.nodes_of), report["network"]]
        notes = list(scaling.notes(counts, measured.slots))
        report |= {"task": measured.task, "base": base, "weak": options.weak}
    print(*lines, describe(rows), *notes, sep="\n")
    write_json(options.json_file, report | {"rows": [row.as_json() for row in rows]})


def _profiled(
    source: Callable[[], Task], scaling: PlanScaling, counts: Sequence[int], seconds: float
) -> Profile:
    """Profile as many ranks of the task on this host as a forecast needs."""
    from lockstep.tools.plan.profile import profile
    from lockstep.tools.timing.machine import kind_of_device

    sides = [1]
    talking: list[int] = []
    if kind_of_device() == "cpu":
        ranks = min(counts[-1], scaling.per_host)
        most = 8 * cores()
        if ranks > most:
            raise UsageError("more-ranks-than-cores", ranks=ranks, cores=cores(), most=most)
        task_here = source()
        slots = -(-task_here.global_batch // task_here.micro_batch)
        sides = scaling.sides(counts, slots, cores())
        talking = scaling.messages(counts)
    warn_if_busy()
    return profile(source, sides, seconds, cores=cores(), talking=talking)


def _refuse(names: Collection[str], plan: str) -> None:
    """Raise a UsageError if an option of the other kind of plan was given."""
    for name in sorted(names):
        option = "TASK" if name == "task" else option_name(name)
        raise UsageError("option-of-another-plan", option=option, plan=plan)


def counts_of(text: str) -> list[int]:
    """Parse `512`, `1,2,4`, or `1..4096`, where each number doubles the one before. Returns the
    numbers sorted and without repetition. Raises UsageError for other text.
    """
    wrong = UsageError(
        "wrong-value",
        name="workers",
        value=text,
        expected="a number of ranks such as 512, several such as 1,2,4, or powers of two such as"
        " 1..4096",
    )
    if ends := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low = int(ends[1])
        high = int(ends[2])
        if not 1 <= low <= high:
            raise wrong
        numbers = [low << power for power in range((high // low).bit_length())]
    elif all(map(str.isdecimal, text.split(","))):
        numbers = sorted(set(map(int, text.split(","))))
    else:
        raise wrong
    if numbers[0] < 1:
        raise wrong
    if numbers[-1] > MOST:
        raise UsageError("too-many-ranks-to-plan", value=text, most=MOST)
    return numbers
