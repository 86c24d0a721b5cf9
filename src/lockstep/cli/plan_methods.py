"""`lockstep plan TASK --methods`: the ways to make one training of the ranks' work, from formulas."""

from __future__ import annotations

import math
import sys
from functools import partial

import typer

from lockstep.cli.given import task_of
from lockstep.cli.plan_options import Asked
from lockstep.errors import ExitCode, UsageError, WorkerFailed
from lockstep.measure.files import check_writable, write_json


def run(asked: Asked) -> None:
    """Bytes and time of a step for every method, on ranks each with a link of its own."""
    if len(numbers := asked.counts("4")) > 1:
        raise UsageError(f"--workers {asked.workers} with --methods: give one number of ranks")
    workers = numbers[0]
    if asked.step_ms is not None and not 0 < asked.step_ms < math.inf:
        raise UsageError(f"--step-ms {asked.step_ms:g}: give the milliseconds that a rank computes in a step, above 0")
    from lockstep.plan.links.networks import network as network_of

    link = network_of(asked.network)
    check_writable(asked.json_file, "--json")
    assert asked.task is not None
    place, overrides = task_of(asked.task, asked.override)
    from lockstep.plan.methods import measured as were_measured
    from lockstep.plan.methods.cost import Computation
    from lockstep.plan.methods.table import as_json, rows, table
    from lockstep.plan.methods.task import seconds_of, work_of
    from lockstep.training.resolve import resolve, short_name

    name = short_name(place)
    beside = {} if asked.measured is None else were_measured.read(asked.measured, task=name, workers=workers, link=link)
    source = partial(resolve, place, overrides)
    work = work_of(source(), workers)
    try:
        seconds = asked.step_ms / 1e3 if asked.step_ms is not None else seconds_of(source, work.micro_batches, workers)
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from None
    computation = Computation.of(seconds, work.micro_batches)
    found = rows(work.gradients, workers, link, computation, beside)
    rate = "no limit" if math.isinf(link.bandwidth) else f"{link.bandwidth * 8 / 1e6:g} Mbit/s of payload"
    print(
        f"{name}: {work.gradients.bytes / 1e6:.2f} MB of gradients in {len(work.gradients.shapes)} tensors; "
        f"{workers} rank{'s' * (workers != 1)}, {rate}, {1e6 * link.latency:g} us a message"
    )
    how = "given" if asked.step_ms is not None else "measured here, in one process"
    print(
        f"a rank computes {1e3 * seconds:.1f} ms in a step of {work.micro_batches} micro-batch{'es' * (work.micro_batches != 1)} ({how}); "
        f"gradients travel behind {1e3 * computation.behind:.1f} ms of it"
    )
    print(table(found))
    write_json(
        asked.json_file,
        {
            "task": name,
            "workers": workers,
            "network": {"latency": link.latency, "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else "inf"},
            "gradient_bytes": work.gradients.bytes,
            "computation": {"step": computation.step, "behind": computation.behind},
            "rows": as_json(found),
        },
    )
