"""`lockstep replay`: compute a step of a recorded run again, and look at it."""

from __future__ import annotations

import math
import shlex
import sys
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.cli.arguments import existing_run
from lockstep.cli.completion import runs
from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.settings import Device
from lockstep.data.windows import counted
from lockstep.errors import ExitCode, UsageError
from lockstep.runtime.streams import plain
from lockstep.tools.timing.output_files import check_writable, table, write_json, writing

if TYPE_CHECKING:
    from lockstep.runs import Run
    from lockstep.tools.replay.bisect_run import Irreproducible
    from lockstep.tools.replay.computed import ComputedStep
    from lockstep.tools.replay.steps import Comparison, ReplayPlan

FLOAT32 = 2.0**-24  # the relative size of a rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayChoice:
    """The options of a replay. Raises UsageError for values that cannot be combined."""

    step: Annotated[
        str | None, Knob("run", unit="N|N:M|last|worst|all", default="last", common=True)
    ] = None
    """Steps to look at. worst is the largest jump of the loss against its running median."""
    workers: Annotated[
        int | None,
        Knob("run", unit="K", least=1, default="1", flags=("--workers", "-n"), common=True),
    ] = None
    """Number of ranks that compute. Local steps need the recorded number."""
    device: Annotated[Device, Knob("run", common=True)] = "auto"
    """Device of the ranks that compute."""
    samples: Annotated[int, Knob("run", unit="K", least=0, common=True)] = 0
    """Also name the K samples with the highest losses, and their shares of the gradient."""
    slot: Annotated[int | None, Knob("run", unit="S", least=0, default="0", common=True)] = None
    """Micro-batch for --break and --to."""
    break_at: Annotated[
        Literal["forward", "backward", "step"] | None,
        Knob("run", flags=("--break",), common=True),
    ] = None
    """Open the debugger before the forward or the backward of --slot, or before the update."""
    to: Annotated[Path | None, Knob("run", unit="FOLDER", common=True)] = None
    """Write the micro-batch of --slot, the weights before the step, and the gradients."""
    bisect: Annotated[bool, Knob("run", common=True)] = False
    """Find the first step that cannot be reproduced, in the whole run or in --step."""
    json_file: Annotated[Path | None, Knob("run", unit="FILE", flags=("--json",), common=True)] = (
        None
    )
    """Also write the result to FILE as JSON."""

    def __post_init__(self) -> None:
        knob.check(self)
        if self.break_at is not None and self.workers not in (None, 1):
            raise UsageError(
                "options-exclude-each-other",
                one="--break",
                other=f"--workers {self.workers}",
                reason="the debugger needs the terminal, which one process has",
            )
        looks = {
            "--samples": self.samples > 0,
            "--break": self.break_at is not None,
            "--to": self.to is not None,
        }
        for option, given in looks.items():
            if self.bisect and given:
                raise UsageError(
                    "options-exclude-each-other",
                    one="--bisect",
                    other=option,
                    reason="it looks at no step; look at the one that it names",
                )
        if self.slot is not None and self.break_at is None and self.to is None:
            raise UsageError(
                "option-missing",
                option="--slot",
                needed="--break or --to",
                reason="all micro-batches are shown",
            )
        folder = self.to
        if (
            folder is not None
            and folder.exists()
            and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise UsageError("folder-not-empty", option="--to", folder=str(folder))


def replay(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            autocompletion=runs,
            help="Run directory of `lockstep train`. latest is the newest under runs/.",
        ),
    ],
    options: ReplayChoice,
) -> None:
    """Compute steps of RUN again on one process, and show each micro-batch.

    It begins with the newest checkpoint before the step, and only reads RUN. With --exact runs the
    loss has the recorded bits, at any number of workers. The exit code is 1 if the loss cannot be
    reproduced.

    \b
    Examples:
      lockstep replay runs/a --step 312                 the micro-batches of step 312
      lockstep replay runs/a --step worst --samples 3   the samples behind a spike
      lockstep replay runs/a --bisect                   the first step that differs
    """
    run = existing_run(run)
    check_writable(options.json_file, "--json")
    if options.to is not None:
        with writing(options.to, "--to"):
            options.to.mkdir(parents=True, exist_ok=True)
    from lockstep.runs import read

    try:
        reproduced = (_bisect if options.bisect else _look)(run, read(run), options)
    except BdbQuit:
        raise typer.Exit from None
    if not reproduced:
        raise typer.Exit(ExitCode.FAILED)


def _bisect(path: Path, run: Run, options: ReplayChoice) -> bool:
    """Print the first step that cannot be reproduced. Return whether all can."""
    from lockstep.tools.replay.bisect_run import first_irreproducible, in_words
    from lockstep.tools.replay.steps import steps_of

    first, last = steps_of(options.step or "all", run)
    result = first_irreproducible(
        run, first, last, workers=options.workers, device=options.device, say=_progress
    )
    if result is None:
        print(f"replay: {in_words(run, first, last)} of {path} can be reproduced")
    else:
        _print_bisected(path, result)
    write_json(options.json_file, _bisected_json(path, result))
    return result is None


def _look(path: Path, run: Run, options: ReplayChoice) -> bool:
    """Print the steps that were asked for. Return whether they can be reproduced."""
    from lockstep.tools.replay.computed import Detail
    from lockstep.tools.replay.steps import compare, compute, plan_of, ranks_by_slot, steps_of

    first, last = steps_of(options.step or "last", run)
    plan = plan_of(run, first, last, workers=options.workers, device=options.device)
    _progress(_announcement(path, plan))
    for warning in plan.warnings:
        _progress(f"warning: {warning}")
    detail = Detail(
        first=first,
        last=last,
        samples=options.samples,
        stop=options.break_at,
        slot=options.slot or 0,
        folder=options.to,
    )
    shown = []
    ranks = {}
    for one in compute(plan, detail).steps:
        if one.step >= first:
            shown.append((one, compare(plan, one)))
            ranks[one.step] = ranks_by_slot(run, one)
    if len(shown) == 1:
        one, loss = shown[0]
        print(plain("\n".join(_step_lines(plan, one, loss, ranks[one.step]))))
    else:
        print(_table(shown))
        for one, _ in shown:
            if one.samples or one.notes:
                print(plain("\n".join([f"\nstep {one.step}", *_sample_lines(one)])))
    if options.to is not None:
        print(f"written: {options.to} (python {options.to / 'load.py'} loads it)")
    write_json(
        options.json_file,
        {
            "run": str(path),
            "from_step": plan.begin,
            "workers": plan.settings.workers,
            "exact": plan.settings.exact,
            "warnings": list(plan.warnings),
            "steps": [_step_json(one, loss, ranks[one.step]) for one, loss in shown],
        },
    )
    return all(loss is None or loss.reproduced for _, loss in shown)


def _progress(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


def _announcement(run: Path, plan: ReplayPlan) -> str:
    """Say how many steps are computed, from where, and how long that takes."""
    origin = "the beginning" if plan.start is None else f"the checkpoint of step {plan.begin}"
    line = (
        f"replay {run}: {counted(plan.count, 'step')} from {origin}, on"
        f" {counted(plan.settings.workers, 'worker')}"
    )
    if not math.isnan(plan.seconds):
        line += f", about {_seconds(plan.seconds)}"
    return line


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _verdict(loss: Comparison | None, *, exact: bool) -> str:
    """Compare the computed loss with the recorded one, in words."""
    if loss is None:
        return "no loss was recorded"
    if loss.same:
        return "recorded: the same bits"
    words = f"recorded {loss.recorded!r}, relative difference {loss.relative:.2g}"
    if exact:
        return f"{words}: cannot be reproduced"
    if loss.reproduced:
        return f"{words}, {loss.relative / FLOAT32:.1f} roundings of float32: within rounding"
    return f"{words}: more than rounding explains ({loss.tolerance:.2g})"


def _step_lines(
    plan: ReplayPlan, one: ComputedStep, loss: Comparison | None, ranks: Mapping[int, int]
) -> list[str]:
    lines = [
        f"step {one.step}, epoch {one.epoch}: loss {one.loss!r}"
        f" ({_verdict(loss, exact=plan.settings.exact)})"
    ]
    rows: list[list[object]] = []
    for micro_batch in one.micro_batches:
        rank = ranks.get(micro_batch.slot)
        rows.append(
            [
                micro_batch.slot,
                "" if rank is None else rank,
                micro_batch.samples,
                f"{micro_batch.weight:g}",
                f"{micro_batch.loss:.6g}",
                f"{micro_batch.gradient_norm:.4g}",
            ]
        )
    lines += [
        "",
        table("slot | rank | samples | weight | mean loss | gradient norm", rows, left=()),
    ]
    norm = f"gradient norm {one.gradient_norm:.6g}"
    if one.clipped_norm < one.gradient_norm * (1 - 1e-6):
        norm += f", clipped to {one.clipped_norm:.6g}"
    lines += ["", f"{norm}; learning rate {one.lr:g}"]
    if one.skipped is not None:
        lines.append(f"no update was made: {one.skipped}")
    updates: list[list[object]] = []
    for update in one.updates:
        updates.append([update.name, f"{update.relative:.3g}", f"{update.norm:.3g}"])
    if updates:
        lines += ["", table("largest updates | against the weight | norm", updates, left=(0,))]
    if one.samples or one.notes:
        lines += ["", *_sample_lines(one)]
    return lines


def _sample_lines(one: ComputedStep) -> list[str]:
    rows: list[list[object]] = []
    for sample in one.samples:
        share = "" if math.isnan(sample.share) else f"{round(sample.share, 3) + 0.0:.1%}"
        row = [sample.index, sample.slot, f"{sample.loss:.6g}", share, sample.description]
        rows.append(row)
    lines = [f"note: {note}" for note in one.notes]
    if rows:
        lines.insert(0, table("sample | slot | loss | share of the gradient | ", rows, left=(4,)))
    return lines


def _table(steps: Sequence[tuple[ComputedStep, Comparison | None]]) -> str:
    """Return a line for each of several steps."""
    rows: list[list[object]] = []
    for one, loss in steps:
        verdict = ""
        if loss is not None:
            verdict = "same bits" if loss.same else f"{loss.relative:.2g}"
        rows.append(
            [
                one.step,
                f"{one.loss:.9g}",
                "" if loss is None else f"{loss.recorded:.9g}",
                verdict,
                f"{one.gradient_norm:.4g}",
                f"{one.clipped_norm:.4g}",
                f"{one.lr:.4g}",
            ]
        )
    header = "step | loss | recorded | difference | gradient norm | after the clip | learning rate"
    return table(header, rows, left=())


def _step_json(
    one: ComputedStep, loss: Comparison | None, ranks: Mapping[int, int]
) -> dict[str, Any]:
    step = asdict(one)
    for micro_batch in step["micro_batches"]:
        micro_batch["rank"] = ranks.get(micro_batch["slot"])
    if loss is not None:
        step["recorded_loss"] = loss.recorded
        step["same_bits"] = loss.same
        step["reproduced"] = loss.reproduced
    return step


def _print_bisected(run: Path, result: Irreproducible) -> None:
    if result.loss is not None:
        verdict = _verdict(result.loss, exact=result.plan.settings.exact)
        print(
            f"replay: step {result.step} cannot be reproduced: loss {result.loss.computed!r} ({verdict})"
        )
    else:
        print(
            f"replay: the weights after step {result.step} cannot be reproduced: {result.parameter}"
            " differs from the checkpoint, and all losses before agree"
        )
    origin = "the beginning" if result.plan.start is None else f"step {result.plan.begin}"
    changes = [*result.plan.warnings, *result.events]
    print(f"computed from {origin}. What has changed since then, by the records and this host:")
    for line in changes or ["nothing that changes a training"]:
        print(plain(f"  {line}"))
    print(f"look at it: lockstep replay {shlex.quote(str(run))} --step {result.step}")


def _bisected_json(run: Path, result: Irreproducible | None) -> dict[str, Any]:
    if result is None:
        return {"run": str(run), "step": None}
    return {
        "run": str(run),
        "step": result.step,
        "from_step": result.plan.begin,
        "recorded_loss": result.loss and result.loss.recorded,
        "loss": result.loss and result.loss.computed,
        "parameter": result.parameter,
        "events": list(result.events),
        "warnings": list(result.plan.warnings),
    }
