"""`lockstep plan`: what a training would send and how long it would take, from formulas, before anybody runs it."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.over_run import TaskName
from lockstep.errors import ExitCode, UsageError, WorkerFailed
from lockstep.measure.files import check_writable, write_json


def plan(
    task: TaskName,
    methods: Annotated[bool, typer.Option("--methods", help="Compare the ways to make one training of the ranks' work.")] = False,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Ranks, each with a link of its own.")] = 4,
    network: Annotated[
        str, typer.Option(metavar="NAME|US,RATE", help="100Mbit, 1Gbit, 10Gbit, 25GbE, free, or latency and rate: 500,50Mbit.")
    ] = "1Gbit",
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms", metavar="MS", show_default=False, help="What a rank computes in a step; default: measured here, in one process."
        ),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="What benchmarks/slow_link.py --json wrote, set beside it.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="A parameter of task(); may be repeated.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the figures to this file, too.")
    ] = None,
) -> None:
    """Foretell bytes and time of a step of TASK for every method, on a network that need not be there.

    Communication follows from sizes, latency and bandwidth; what leaves during the backward of a rank's last micro-batch is hidden behind it, but
    for the last bucket. Compressing is taken to cost nothing, and every rank to compute alike.
    """
    if not methods:
        raise UsageError("lockstep plan compares methods so far, and nothing else: give --methods")
    if workers < 1:
        raise UsageError(f"--workers {workers}: give at least 1")
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise UsageError(f"--step-ms {step_ms:g}: give the milliseconds that a rank computes in a step, above 0")
    from lockstep.measure.plan.networks import network as network_of

    link = network_of(network)
    check_writable(json_file, "--json")
    from lockstep.measure.plan import measured as were_measured
    from lockstep.measure.plan.cost import Computation
    from lockstep.measure.plan.model import seconds_of, work_of
    from lockstep.measure.plan.table import as_json, rows, table
    from lockstep.settings import overrides_of
    from lockstep.training.resolve import locate, resolve, short_name

    place, overrides = locate(task), overrides_of(override or [])
    beside = {} if measured is None else were_measured.read(measured, task=short_name(place), workers=workers, link=link)
    source = partial(resolve, place, overrides)
    work = work_of(source(), workers)
    try:
        seconds = step_ms / 1e3 if step_ms is not None else seconds_of(source, work.micro_batches, workers)
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from None
    computation = Computation.of(seconds, work.micro_batches)
    found = rows(work.gradients, workers, link, computation, beside)
    rate = "no limit" if math.isinf(link.bandwidth) else f"{link.bandwidth * 8 / 1e6:g} Mbit/s"
    print(
        f"{short_name(place)}: {work.gradients.bytes / 1e6:.2f} MB of gradients in {len(work.gradients.shapes)} tensors; "
        f"{workers} rank{'s' * (workers != 1)}, {rate}, {1e6 * link.latency:g} us a message"
    )
    how = "given" if step_ms is not None else "measured here, in one process"
    print(
        f"a rank computes {1e3 * seconds:.1f} ms in a step of {work.micro_batches} micro-batch{'es' * (work.micro_batches != 1)} ({how}); "
        f"gradients travel behind {1e3 * computation.behind:.1f} ms of it"
    )
    print(table(found))
    write_json(
        json_file,
        {
            "task": short_name(place),
            "workers": workers,
            "network": {"latency": link.latency, "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else "inf"},
            "gradient_bytes": work.gradients.bytes,
            "computation": {"step": computation.step, "behind": computation.behind},
            "rows": as_json(found),
        },
    )
