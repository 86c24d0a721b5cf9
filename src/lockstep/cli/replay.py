"""`lockstep replay`: compute a step of a recorded run again, and look at it."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.cli.arguments import JsonFile, at_least_one, existing_run
from lockstep.cli.completion import runs
from lockstep.config.knob import whole
from lockstep.config.settings import Device
from lockstep.data.windows import counted
from lockstep.errors import ExitCode, UsageError
from lockstep.runtime.streams import plain
from lockstep.tools.timing.output_files import check_writable, table, write_json, writing

if TYPE_CHECKING:
    from lockstep.tools.replay.bisect_run import Irreproducible
    from lockstep.tools.replay.computed import ComputedStep
    from lockstep.tools.replay.replay import Comparison, Plan

Point = Literal["forward", "backward", "step"]
FLOAT32 = 2.0**-24  # the relative size of a rounding


def replay(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            autocompletion=runs,
            help="Run directory of `lockstep train`. latest is the newest under runs/.",
        ),
    ],
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="N|N:M|last|worst",
            help=(
                "Steps to look at. worst is the largest jump of the loss against its running median."
                " Default: last."
            ),
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="K",
            help="Number of ranks that compute. Default: 1. Local steps need the recorded number.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            metavar="K",
            help="Also name the K samples with the highest losses, and their shares in the gradient.",
        ),
    ] = 0,
    slot: Annotated[
        int,
        typer.Option("--slot", metavar="S", help="Micro-batch for --break and --to. Default: 0."),
    ] = 0,
    stop: Annotated[
        Point | None,
        typer.Option(
            "--break",
            metavar="forward|backward|step",
            help="Open the debugger before the forward or backward of --slot, or before the update.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="FOLDER",
            help="Write the micro-batch of --slot, the weights before the step, and the gradients.",
        ),
    ] = None,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            help="Find the first step that cannot be reproduced, in the whole run or in --step.",
        ),
    ] = False,
    device: Annotated[
        Device, typer.Option("--device", help="Device of the ranks that compute.")
    ] = "auto",
    json: JsonFile = None,
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
    at_least_one(workers=workers)
    _check(samples, slot, stop, to, workers, bisect)
    run = existing_run(run)
    check_writable(json, "--json")
    if to is not None:
        with writing(to, "--to"):
            to.mkdir(parents=True, exist_ok=True)
    from lockstep import runs as recorded_runs
    from lockstep.tools.replay import bisect_run, replay
    from lockstep.tools.replay.computed import Detail

    recorded = recorded_runs.read(run)
    if bisect:
        first, last = replay.steps_of(step or f"1:{recorded.steps[-1].step}", recorded)
        found = bisect_run.first_irreproducible(
            recorded, first, last, workers=workers, device=device, say=_progress
        )
        _print_bisected(run, first, last, found)
        write_json(json, _bisected_json(run, found))
        if found is not None:
            raise typer.Exit(ExitCode.FAILED)
        return
    first, last = replay.steps_of(step or "last", recorded)
    plan = replay.plan_of(recorded, first, last, workers=workers, device=device)
    _progress(_announcement(run, plan, first))
    for warning in plan.warnings:
        _progress(f"warning: {warning}")
    detail = Detail(first=first, last=last, samples=samples, stop=stop, slot=slot, folder=to)
    computed = replay.compute(plan, detail).steps
    shown = []
    for one in computed:
        if one.step >= first:
            shown.append((one, replay.compare(plan, one)))
    slots_of = {one.step: replay.ranks_by_slot(recorded, one) for one, _ in shown}
    if len(shown) == 1:
        one, loss = shown[0]
        print(plain("\n".join(_step_lines(plan, one, loss, slots_of[one.step]))))
    else:
        print(_table(plan, shown))
    if to is not None:
        print(f"written: {to} (python {to / 'load.py'} loads it)")
    write_json(
        json,
        {
            "run": str(run),
            "from_step": plan.begin,
            "workers": plan.settings.workers,
            "exact": plan.settings.exact,
            "warnings": list(plan.warnings),
            "steps": [_step_json(one, loss, slots_of[one.step]) for one, loss in shown],
        },
    )
    if any(loss is not None and not loss.reproduced for _, loss in shown):
        raise typer.Exit(ExitCode.FAILED)


def _check(
    samples: int,
    slot: int,
    stop: Point | None,
    to: Path | None,
    workers: int | None,
    bisect: bool,
) -> None:
    """Raise UsageError for options that cannot be combined."""
    whole("samples", samples, 0)
    whole("slot", slot, 0)
    if stop is not None and workers not in (None, 1):
        raise UsageError(
            "options-exclude-each-other",
            one="--break",
            other=f"--workers {workers}",
            reason="the debugger needs the terminal, which one process has",
        )
    looks = {"--samples": samples > 0, "--break": stop is not None, "--to": to is not None}
    for option, given in looks.items():
        if bisect and given:
            raise UsageError(
                "options-exclude-each-other",
                one="--bisect",
                other=option,
                reason="it looks at no step; look at the one that it names",
            )
    if to is not None and to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError("folder-not-empty", option="--to", folder=str(to))


def _progress(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


def _announcement(run: Path, plan: Plan, first: int) -> str:
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
    plan: Plan, one: ComputedStep, loss: Comparison | None, ranks: Mapping[int, int]
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
    else:
        updates: list[list[object]] = []
        for update in one.updates:
            updates.append([update.name, f"{update.relative:.3g}", f"{update.norm:.3g}"])
        lines += ["", table("largest updates | against the weight | norm", updates, left=(0,))]
    if one.samples:
        sample_rows: list[list[object]] = []
        for sample in one.samples:
            sample_rows.append(
                [
                    sample.index,
                    sample.slot,
                    f"{sample.loss:.6g}",
                    "" if math.isnan(sample.share) else f"{round(sample.share, 3) + 0.0:.1%}",
                    sample.description,
                ]
            )
        header = "sample | slot | loss | share of the gradient | "
        lines += ["", table(header, sample_rows, left=(4,))]
    return lines + [f"note: {note}" for note in one.notes]


def _table(plan: Plan, steps: Sequence[tuple[ComputedStep, Comparison | None]]) -> str:
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


def _print_bisected(run: Path, first: int, last: int, result: Irreproducible | None) -> None:
    if result is None:
        print(f"replay: steps {first} to {last} of {run} can be reproduced")
        return
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
    print(plain(f"computed from {origin}; the run has recorded since then:"))
    for line in result.events or ["nothing that changes a training"]:
        print(plain(f"  {line}"))
    for warning in result.plan.warnings:
        print(plain(f"  now: {warning}"))
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
