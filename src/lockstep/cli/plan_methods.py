"""`lockstep plan TASK --methods`: the ways to make one training of the ranks' work, from
formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from lockstep.cli.arguments import task_of
from lockstep.cli.plan_options import PlanChoice
from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import check_writable, write_json

if TYPE_CHECKING:
    from lockstep.collectives.network import Link
    from lockstep.config.task import Task
    from lockstep.tools.plan.work import RankWork

_PROFILED = 1.0  # seconds


def run(asked: PlanChoice, named: str, override: Mapping[str, str]) -> None:
    """Bytes and time of a step for every method, on ranks each with a link of its own."""
    if len(numbers := asked.counts("4")) > 1:
        raise UsageError("not-one-count", option="--methods", workers=asked.workers)
    workers = numbers[0]
    from lockstep.tools.plan.networks import link_named

    link = link_named(asked.network)
    check_writable(asked.json_file, "--json")
    place, overrides = task_of(named, override)
    from lockstep.tools.plan.methods import (
        as_json,
        describe,
        method_rows,
        read_measured,
        work_of_module,
    )
    from lockstep.tools.plan.of_task import slots_of
    from lockstep.training.build import model_of
    from lockstep.training.resolve import resolve, short_name

    name = short_name(place)
    beside = (
        {}
        if asked.measured is None
        else read_measured(asked.measured, task=name, workers=workers, link=link)
    )
    source = partial(resolve, place, overrides)
    task = source()
    micro_batches = -(-slots_of(task) // workers)
    seconds = (
        asked.step_ms / 1e3
        if asked.step_ms is not None
        else _seconds(source, micro_batches, workers)
    )
    work = work_of_module(model_of(task), seconds=seconds, micro_batches=micro_batches)
    found = method_rows(work, workers, link, beside)
    _say(name, work, workers, link, seconds, given=asked.step_ms is not None)
    print(describe(found))
    write_json(
        asked.json_file,
        {
            "task": name,
            "workers": workers,
            "network": {
                "latency": link.latency,
                "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else "inf",
            },
            "gradient_bytes": work.bytes,
            "computation": {"step": seconds, "behind": work.backward},
            "rows": as_json(found),
        },
    )


def _say(
    name: str, work: RankWork, workers: int, link: Link, seconds: float, *, given: bool
) -> None:
    """What the rows are about."""
    rate = (
        "no limit"
        if math.isinf(link.bandwidth)
        else f"{link.bandwidth * 8 / 1e6:g} Mbit/s of payload"
    )
    print(
        f"{name}: {work.bytes / 1e6:.2f} MB of gradients in"
        f" {sum(len(bucket.tensors) for bucket in work.buckets)} tensors; {workers}"
        f" rank{'s' * (workers != 1)}, {rate}, {1e6 * link.latency:g} us a message"
    )
    how = "given" if given else "measured here, in one process"
    print(
        f"a rank computes {1e3 * seconds:.1f} ms in a step of {work.micro_batches}"
        f" micro-batch{'es' * (work.micro_batches != 1)} ({how}); gradients travel behind"
        f" {1e3 * work.backward:.1f} ms of it"
    )


def _seconds(source: Callable[[], Task], micro_batches: int, workers: int) -> float:
    """A step of so many micro-batches with the optimizer's, in one process, with the threads
    that each of so many ranks would have on this host.
    """
    from lockstep.runtime.cores import cores
    from lockstep.tools.timing.profiler import profile

    side = profile(source, [1], _PROFILED, "cpu", threads=max(1, cores() // workers)).sides[0]
    return micro_batches * (side.forward + side.backward) + side.optimizer
