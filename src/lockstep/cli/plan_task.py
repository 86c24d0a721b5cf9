"""`lockstep plan TASK`: a rank is profiled here, and its step simulated among any number of
ranks on any network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.cli.arguments import task_of
from lockstep.cli.plan_options import PlanChoice
from lockstep.config.knob import knobs
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.runtime.cores import warn_if_busy
from lockstep.tools.timing.output_files import check_plot, check_writable, write_json

if TYPE_CHECKING:
    from lockstep.config.task import Task
    from lockstep.tools.plan.curve import Question
    from lockstep.tools.plan.networks import PlanNetwork
    from lockstep.tools.timing.profile import Profile


def run(
    asked: PlanChoice, task: str, override: Mapping[str, str], method: Parallelism, loaders: int
) -> None:
    """The ratio of communication to computation, what was measured, and a row for each number of
    workers.
    """
    for file, option in ((asked.json_file, "--json"), (asked.save_profile, "--save-profile")):
        check_writable(file, option)
    check_plot(asked.plot)
    place, overrides = task_of(task, override)
    question = _question(asked, method, loaders)
    from lockstep.training.resolve import resolve, short_name

    source = partial(resolve, place, overrides)
    if asked.profile is None:
        warn_if_busy()
    _answer(asked, question, source, short_name(place))


def _question(asked: PlanChoice, method: Parallelism, loaders: int) -> Question:
    """Refuses at once what would be found out after the measurement."""
    from lockstep.tools.plan.networks import HERE, connection

    counts = asked.counts("1,2,4,8")
    if asked.network == HERE:
        _check_here(asked, method)
    else:
        connection(asked.network, asked.nodes_of)
    from lockstep.tools.plan.curve import Question
    from lockstep.tools.plan.of_task import PlanScaling  # imports torch

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
    """Raise a UsageError for more ranks than could be started here, to hear how they talk."""
    from lockstep.runtime.cores import cores
    from lockstep.tools.timing.machine import kind_of_device

    if kind_of_device() == "cpu" and ranks > (most := 8 * cores()):
        raise UsageError("more-ranks-than-cores", ranks=ranks, cores=cores(), most=most)


def _answer(asked: PlanChoice, question: Question, source: Callable[[], Task], name: str) -> None:
    from lockstep.tools.plan.curve import curve, describe, describe_layouts, layouts_of, plot

    profile = _profile(asked, question, source, name)
    if asked.profile is None:
        _say_ratio(asked, question, profile)
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
    if asked.plot is not None:
        plot(found, asked.plot)


def _say_ratio(asked: PlanChoice, question: Question, profile: Profile) -> None:
    """Communication to computation of this task. On this host sums are measured, and there is no
    link to divide by.
    """
    from lockstep.tools.bench.ratio import ratio_of
    from lockstep.tools.plan.networks import HERE, connection
    from lockstep.tools.plan.of_task import gradient_work_of

    if asked.network != HERE and question.method.mesh is None:
        workers = max(question.workers)
        found = ratio_of(
            profile.task,
            gradient_work_of(profile, question.scaling, workers),
            profile.flops,
            samples=min(profile.micro_batch, profile.global_batch),
            world_size=workers,
            network=connection(asked.network).links.between,
            method=question.method,
            told=_told(question.method),
        )
        print(f"{found.describe()}\n")


def _told(method: Parallelism) -> str:
    """The method, as it was written."""
    changed = [
        field
        for field in knobs(Parallelism).values()
        if getattr(method, field.name) != field.default
    ]
    return (
        " ".join(f"{field.flags[0]} {getattr(method, field.name)}" for field in changed) or "native"
    )


def _profile(
    asked: PlanChoice, question: Question, source: Callable[[], Task], name: str
) -> Profile:
    """From the file, or measured now."""
    from lockstep.runtime.cores import cores
    from lockstep.tools.plan.networks import HERE
    from lockstep.tools.plan.of_task import sides, slots_of, talking
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
    """What connects the ranks; on this host it is measured now."""
    from lockstep.tools.plan.networks import HERE, connection
    from lockstep.tools.plan.this_host import on_this_host

    if asked.network != HERE:
        return connection(asked.network, asked.nodes_of)
    largest = max(each.elements for each in profile.buckets) * profile.width
    return on_this_host(
        sorted({*question.workers, question.scaling.base}), largest, question.method
    )
