"""The options of `lockstep plan`, and their valid combinations."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lockstep.cli.options import option_name
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.tools.plan.curve import Failures

Kind = Literal["task", "methods", "model", "given"]

MOST = 2**20  # ranks
METHOD = tuple(name for name in knob.knobs(Parallelism) if name != "exact")
"""The options of lockstep.config.parallelism that a plan accepts."""

_EVERY = {"workers", "network", "json_file"}
_TAKES: dict[Kind, set[str]] = {
    "methods": _EVERY | {"task", "methods", "step_ms", "measured", "overrides"},
    "model": _EVERY | {*METHOD, "model", "device", "batch", "nodes_of"},
    "given": _EVERY | {"reduce", "gradient_mb", "buckets", "step_ms", "nodes_of"},
    "task": (
        _EVERY
        | {
            *METHOD,
            "task",
            "nodes_of",
            "ranks_per_host",
            "weak",
            "mtbf",
            "checkpoint_cost",
            "restart",
            "storage",
            "loader_workers",
            "seconds",
        }
        | {"profile", "save_profile", "noise_scale", "overrides", "out"}
    ),
}
_FAILURES = {"checkpoint_cost", "restart"}
_TOLD: dict[Kind, str] = {
    "methods": "--methods",
    "model": "--model",
    "given": "--gradient-mb",
    "task": "the plan of a task",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """The options of a plan, without the task and the method. Raises UsageError for values that
    cannot work.
    """

    workers: Annotated[
        str | None, Knob("run", unit="N|N,N|N..N", flags=("--workers", "-n"), common=True)
    ] = None
    """Numbers of ranks: one (512), a list (1,2,4), or powers of two (1..4096)."""
    network: Annotated[str, Knob("cluster", unit="NAME|US,RATE|FILE", common=True)] = "1Gbit"
    """Network between nodes: a name (25GbE, NVLink+IB), latency,rate (500,50Mbit), a `bench
    collectives` file, free, or here.
    """
    nodes_of: Annotated[int, Knob("cluster", unit="N", least=1, common=True)] = 1
    """Number of ranks on a node, which share its network."""
    ranks_per_host: Annotated[str | None, Knob("cluster", unit="N|all", default="--nodes-of")] = (
        None
    )
    """Number of ranks that share the cores of a host like this one."""
    weak: Annotated[
        bool, Knob("training", flags=("--weak/--strong",), default="strong", common=True)
    ] = False
    """Keep the batch of each rank (weak), or the global batch (strong)."""
    storage: Annotated[float | None, Knob("training", unit="SAMPLES/S", above=0)] = None
    """Samples per second that the storage delivers to all ranks together."""
    mtbf: Annotated[float | None, Knob("faults", unit="HOURS", above=0)] = None
    """Mean hours between two failures of one rank. Adds a prediction of goodput."""
    checkpoint_cost: Annotated[float, Knob("faults", unit="SECONDS", above=0)] = 10.0
    """Seconds that a checkpoint delays training (with --mtbf)."""
    restart: Annotated[float, Knob("faults", unit="SECONDS", least=0)] = 60.0
    """Seconds from a failure until training continues (with --mtbf)."""
    seconds: Annotated[float, Knob("measurement", unit="SECONDS", above=0)] = 30.0
    """Seconds to profile each rank, excluding warm-up."""
    profile: Annotated[Path | None, Knob("measurement", unit="FILE", common=True)] = None
    """Load a file of --save-profile, and measure nothing."""
    save_profile: Annotated[Path | None, Knob("measurement", unit="FILE", common=True)] = None
    """Write the measured profile to FILE, for --profile."""
    noise_scale: Annotated[bool, Knob("measurement")] = False
    """Measure the gradient noise scale: the global batch beyond which more workers stop helping."""
    methods: Annotated[bool, Knob("run", common=True)] = False
    """Compare the training methods, computed from formulas."""
    step_ms: Annotated[float | None, Knob("measurement", unit="MS", above=0)] = None
    """Milliseconds of computation per step of a rank (with --methods or --gradient-mb)."""
    gradient_mb: Annotated[float | None, Knob("run", unit="MB", above=0)] = None
    """Plan a step with this many megabytes of gradients, in place of a task (with --step-ms)."""
    buckets: Annotated[int, Knob("run", unit="N", least=1)] = 1
    """Number of equal gradient buckets (with --gradient-mb)."""
    measured: Annotated[Path | None, Knob("measurement", unit="FILE")] = None
    """Also show the measurements of a benchmarks/slow_link.py --json file (with --methods)."""
    model: Annotated[str | None, Knob("run", unit="NAME", common=True)] = None
    """Plan a known model in place of a task: resnet50, vgg16, gpt3-175b, ... (with --device)."""
    device: Annotated[str | None, Knob("run", unit="NAME", common=True)] = None
    """Device for --model: p100, v100, rtx4090, a100-80g, h100, h200."""
    batch: Annotated[int | None, Knob("run", unit="N", least=1, common=True)] = None
    """Samples per device and step (with --model)."""
    json_file: Annotated[Path | None, Knob("run", unit="FILE", flags=("--json",))] = None
    """Also write the result to FILE as JSON."""
    out: Annotated[Path | None, Knob("run", unit="FILE.svg", flags=("--out", "--plot"))] = None
    """Draw samples/s over the number of workers to FILE (.svg)."""

    def __post_init__(self) -> None:
        knob.check(self)

    def counts(self, usual: str) -> list[int]:
        """Return the numbers of ranks, sorted and without repetition."""
        return counts_of(usual if self.workers is None else self.workers)

    def failures(self) -> Failures | None:
        from lockstep.tools.plan.curve import Failures

        if self.mtbf is None:
            return None
        return Failures(
            mtbf=3600 * self.mtbf, checkpoint=self.checkpoint_cost, restart=self.restart
        )

    def per_host(self) -> int | None:
        """Return how many ranks share the cores of a host; None means all ranks."""
        text = self.ranks_per_host
        if text == "all" or (text is None and self.network == "here"):
            return None
        if text is None:
            return self.nodes_of
        if not text.isdecimal() or int(text) < 1:
            expected = "the ranks that share one host's cores, at least 1, or all"
            raise UsageError("wrong-type", name="ranks_per_host", value=text, expected=expected)
        return int(text)


def check_together(task: str | None, asked: PlanChoice, given: Collection[str]) -> Kind:
    """Return the kind of the plan. Raises UsageError for an option that this kind does not use."""
    kind = _kind(asked)
    if kind == "given" and asked.step_ms is None:
        raise UsageError(
            "option-missing",
            option="--gradient-mb",
            needed="--step-ms MS",
            reason="a step is the computation and the communication of its gradients",
        )
    if task is None and kind in ("task", "methods"):
        raise UsageError(
            "option-missing",
            option="lockstep plan",
            needed="a TASK, --model and --device, or --gradient-mb",
            reason="it predicts the steps of digits, text, a Python file, or a model of the table",
        )
    for name in sorted(given):
        if name not in _TAKES[kind]:
            raise UsageError(
                "option-of-another-plan",
                option="TASK" if name == "task" else option_name(name),
                plan=_TOLD[kind],
            )
        if name in _FAILURES and asked.mtbf is None:
            raise UsageError(
                "option-missing",
                option=option_name(name),
                needed="--mtbf HOURS",
                reason="without failures there is no goodput to predict",
            )
    if asked.profile is not None:
        for name in ("seconds", "save_profile"):
            if name in given:
                raise UsageError(
                    "options-exclude-each-other",
                    one=option_name(name),
                    other=f"--profile {asked.profile}",
                    reason="a plan from a profile measures nothing",
                )
    return kind


def _kind(asked: PlanChoice) -> Kind:
    if asked.methods:
        return "methods"
    if asked.model is not None:
        return "model"
    return "task" if asked.gradient_mb is None else "given"


def counts_of(text: str) -> list[int]:
    """Parse `512`, `1,2,4`, or `1..4096`, where each number doubles the one before. Raises
    UsageError for other text.
    """
    wrong = UsageError(
        "wrong-type",
        name="workers",
        value=text,
        expected="a number of ranks such as 512, several such as 1,2,4, or powers of two such as"
        " 1..4096",
    )
    if found := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = int(found[1]), int(found[2])
        if not 1 <= low <= high:
            raise wrong
        numbers = [
            low << power for power in range((high // low).bit_length()) if low << power <= high
        ]
    elif all(part.isdecimal() for part in text.split(",")):
        numbers = sorted({int(part) for part in text.split(",")})
    else:
        raise wrong
    if numbers[0] < 1:
        raise wrong
    if numbers[-1] > MOST:
        raise UsageError("too-many-ranks-to-plan", value=text, most=MOST)
    return numbers
