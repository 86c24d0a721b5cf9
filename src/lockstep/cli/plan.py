"""`lockstep plan`: predict the time of a step on ranks and a network that need not exist.

plan TASK                        profile a rank here, and simulate its step
plan TASK --methods              compare training methods by formulas
plan --model M --device D        plan a known model on known devices, from tables
plan --gradient-mb N --step-ms N plan a step from these two numbers only
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.arguments import task_of
from lockstep.cli.completion import tasks
from lockstep.cli.options import GivenNames, Only
from lockstep.cli.plan_options import METHOD, PlanChoice, check_together
from lockstep.config.launching import RunChoice
from lockstep.config.parallelism import Parallelism
from lockstep.config.settings import Config
from lockstep.errors import UsageError
from lockstep.runtime.cores import warn_if_busy
from lockstep.tools.timing.output_files import check_picture, check_writable, write_json

if TYPE_CHECKING:
    from lockstep.collectives.network import Link
    from lockstep.config.task import Task
    from lockstep.tools.plan.curve import Question
    from lockstep.tools.plan.networks import PlanNetwork
    from lockstep.tools.plan.work import RankWork
    from lockstep.tools.timing.profile import Profile


def plan(
    asked: PlanChoice,
    method: Annotated[Parallelism, Only(*METHOD)],
    config: Annotated[Config, Only("loader_workers")],
    choice: Annotated[RunChoice, Only("overrides")],
    given: GivenNames,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            autocompletion=tasks,
            help="Bundled task (digits, text), or a Python file whose task() returns a lockstep.Task.",
        ),
    ] = None,
) -> None:
    """Predict the step time of TASK, or of a known --model, at any number of workers.

    It first profiles one rank of the task on this host: the phases of a step, and when each gradient
    bucket is complete. Then it simulates the step: buckets cross the network one after the other,
    ranks wait for the slowest one, and ranks share loaders and storage.

    \b
    Examples:
      lockstep plan digits --workers 1..64           1 to 64 ranks, on 1 Gbit/s
      lockstep plan my_task.py -n 8 --network 25GbE  8 ranks, on another network
      lockstep plan --model resnet50 --device h100   a known model; profiles nothing
    """
    kind = check_together(task, asked, given)
    if kind == "model":
        predict_model(asked, method)
        return
    if kind == "given":
        predict_given(asked, method)
        return
    assert task is not None
    if kind == "methods":
        compare_methods(asked, task, choice.overrides)
    else:
        predict_task(asked, task, choice.overrides, method, config.loader_workers)


def predict_task(
    asked: PlanChoice, task: str, override: Mapping[str, str], method: Parallelism, loaders: int
) -> None:
    """Print the ratio of communication to computation, the measurements, and a row for each number
    of workers.
    """
    for file, option in ((asked.json_file, "--json"), (asked.save_profile, "--save-profile")):
        check_writable(file, option)
    check_picture(asked.out)
    place, overrides = task_of(task, override)
    question = _question(asked, method, loaders)
    from lockstep.training.resolve import resolve, short_name

    source = partial(resolve, place, overrides)
    if asked.profile is None:
        warn_if_busy()
    _answer(asked, question, source, short_name(place))


def _question(asked: PlanChoice, method: Parallelism, loaders: int) -> Question:
    """Return the question to the planner. Errors that need no measurement are raised here, before
    it.
    """
    from lockstep.tools.plan.networks import HERE, connection

    counts = asked.counts("1,2,4,8")
    if asked.network == HERE:
        _check_here(asked, method)
    else:
        connection(asked.network, asked.nodes_of)
    from lockstep.tools.plan.curve import Question
    from lockstep.tools.plan.work import PlanScaling  # imports torch

    base = counts[0] if len(counts) > 1 else 1
    scaling = PlanScaling(base=base, weak=asked.weak, per_host=asked.per_host(), loaders=loaders)
    _check_cores(scaling.on_host(counts[-1]))
    return Question(
        workers=counts,
        scaling=scaling,
        method=method,
        failures=asked.failures(),
        storage=asked.storage,
    )


def _check_here(asked: PlanChoice, method: Parallelism) -> None:
    if asked.nodes_of != 1:
        raise UsageError("not-on-network-here", what=f"--nodes-of {asked.nodes_of}")
    if method.update != "replicated" or method.local is not None or method.mesh is not None:
        raise UsageError(
            "not-on-network-here", what="an update other than replicated, local steps or a mesh"
        )


def _check_cores(ranks: int) -> None:
    """Raise a UsageError for more ranks than this host can start to measure their communication."""
    from lockstep.runtime.cores import cores
    from lockstep.tools.timing.machine import kind_of_device

    if kind_of_device() == "cpu" and ranks > (most := 8 * cores()):
        raise UsageError("more-ranks-than-cores", ranks=ranks, cores=cores(), most=most)


def _answer(asked: PlanChoice, question: Question, source: Callable[[], Task], name: str) -> None:
    from lockstep.tools.plan.curve import curve, describe, describe_layouts, drawing, layouts_of

    profile = _profile(asked, question, source, name)
    print(profile.describe(question.scaling.per_host))
    joined = _joined(asked, question, profile)
    print(joined.words)
    found = curve(profile, question, joined)
    print(describe(found))
    ranked = layouts_of(profile, question, joined)
    print(describe_layouts(ranked, max(question.workers)), end="")
    more: dict[str, Any] = {}
    if asked.noise_scale:
        from lockstep.tools.plan.noise_scale import noise_scale_of

        noise = noise_scale_of(source)
        print(noise.describe())
        more["noise_scale"] = noise.as_json()
    head = {
        "task": name,
        "network": joined.words,
        "base": question.scaling.base,
        "weak": question.scaling.weak,
    }
    write_json(
        asked.json_file,
        {
            **head,
            "rows": [row.as_json() for row in found.rows],
            "layouts": [asdict(each) for each in ranked],
            **more,
        },
    )
    if asked.out is not None:
        drawing(found).save(asked.out)


def _profile(
    asked: PlanChoice, question: Question, source: Callable[[], Task], name: str
) -> Profile:
    """Read the profile from its file, or measure it now."""
    from lockstep.runtime.cores import cores
    from lockstep.tools.plan.networks import HERE
    from lockstep.tools.plan.work import sides, slots_of, talking
    from lockstep.tools.timing.machine import kind_of_device
    from lockstep.tools.timing.profile import Profile
    from lockstep.tools.timing.profiler import profile

    task = source()
    if asked.profile is None:
        scaling, counts, device = question.scaling, question.workers, kind_of_device()
        heard = [] if asked.network == HERE else talking(scaling, counts, device)
        found = profile(
            source,
            sides(scaling, counts, slots_of(task), cores(), device),
            asked.seconds,
            talking=heard,
        )
        if asked.save_profile is not None:
            found.write(asked.save_profile)
        return found
    found = Profile.read(asked.profile)
    if (found.task, found.global_batch, found.micro_batch) != (
        name,
        task.global_batch,
        task.micro_batch,
    ):
        raise UsageError(
            "profile-of-another-task",
            file=asked.profile,
            task=found.task,
            batches=(found.global_batch, found.micro_batch),
            planned=name,
            wanted=(task.global_batch, task.micro_batch),
        )
    return found


def _joined(asked: PlanChoice, question: Question, profile: Profile) -> PlanNetwork:
    """Return the network between the ranks; for this host it is measured now."""
    from lockstep.tools.plan.networks import HERE, connection
    from lockstep.tools.plan.this_host import on_this_host

    if asked.network != HERE:
        return connection(asked.network, asked.nodes_of)
    largest = max(each.elements for each in profile.buckets) * profile.width
    return on_this_host(
        sorted({*question.workers, question.scaling.base}), largest, question.method
    )


def compare_methods(asked: PlanChoice, named: str, override: Mapping[str, str]) -> None:
    """Print bytes and time of a step for every method, on ranks that each have their own link."""
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
        step_seconds,
        work_of_module,
    )
    from lockstep.tools.plan.work import slots_of
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
        else step_seconds(source, micro_batches, workers)
    )
    work = work_of_module(model_of(task), seconds=seconds, micro_batches=micro_batches)
    found = method_rows(work, workers, link, beside)
    _say_computation(name, work, workers, link, seconds, given=asked.step_ms is not None)
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


def _say_computation(
    name: str, work: RankWork, workers: int, link: Link, seconds: float, *, given: bool
) -> None:
    """Print the gradients, the link and the computation that the rows are for."""
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
        f" micro-batch{'es' * (work.micro_batches != 1)} ({how}); sending gradients can overlap"
        f" with {1e3 * work.backward:.1f} ms of it"
    )


def predict_model(asked: PlanChoice, chosen: Parallelism) -> None:
    """Print which layouts fit into memory, and how long a step takes in them."""
    if asked.device is None:
        raise UsageError(
            "option-missing",
            option=f"--model {asked.model}",
            needed="--device NAME",
            reason="the plan is for p100, v100, rtx4090, a100-80g, h100 or h200",
        )
    assert asked.model is not None
    from lockstep.tools.plan.model_table import device_named, model_named
    from lockstep.tools.plan.networks import HERE, connection

    if asked.network == HERE:
        raise UsageError("not-on-network-here", what="--model")
    model, device = model_named(asked.model), device_named(asked.device)
    found_network = connection(asked.network, asked.nodes_of)
    check_writable(asked.json_file, "--json")
    counts = asked.counts("1..64")
    from lockstep.tools.plan.model_plan import NCCL, plan_model  # imports torch

    plan = plan_model(
        model,
        device,
        counts,
        found_network.links,
        batch=asked.batch,
        method=None if chosen == Parallelism() else chosen,
        assumed=replace(NCCL, link_error=found_network.error),
    )
    print(found_network.words)
    print(plan.describe())
    write_json(
        asked.json_file,
        {
            "model": model.name,
            "device": device.name,
            "network": found_network.words,
            "rows": plan.as_json(),
        },
    )


def predict_given(asked: PlanChoice, method: Parallelism) -> None:
    """Print the plan of a step from the bytes of its gradients and the time of its computation."""
    from lockstep.tools.plan.networks import HERE, connection

    if asked.network == HERE:
        raise UsageError("not-on-network-here", what="--gradient-mb")
    joined = connection(asked.network, asked.nodes_of)
    check_writable(asked.json_file, "--json")
    from lockstep.tools.plan.given_step import GivenStep, describe, rows  # imports torch

    assert asked.gradient_mb is not None
    assert asked.step_ms is not None
    given = GivenStep(gradient_mb=asked.gradient_mb, buckets=asked.buckets, step_ms=asked.step_ms)
    found = rows(given, asked.counts("1,2,4,8"), joined.links, method, joined.native)
    print(joined.words)
    print(describe(given, found))
    write_json(asked.json_file, {"network": joined.words, "rows": [row.as_json() for row in found]})
