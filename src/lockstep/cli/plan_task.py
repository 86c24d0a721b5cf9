"""`lockstep plan TASK`: a rank is profiled here, and its step simulated among any number of ranks on any network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from lockstep.cli.given import task_of
from lockstep.cli.plan_options import Asked
from lockstep.errors import ExitCode, UsageError, WorkerFailed
from lockstep.load import warn_if_busy
from lockstep.measure.files import check_plot, check_writable, write_json

if TYPE_CHECKING:
    from lockstep.method import Method
    from lockstep.plan.links.connection import Connection
    from lockstep.plan.links.here import ThisHost
    from lockstep.plan.tasks.curve import Question
    from lockstep.plan.tasks.profile import Profile
    from lockstep.task import Task


def run(asked: Asked) -> None:
    """The ratio of communication to computation, what was measured, and a row for each number of workers."""
    for file, option in ((asked.json_file, "--json"), (asked.save_profile, "--save-profile")):
        check_writable(file, option)
    check_plot(asked.plot)
    assert asked.task is not None
    place, overrides = task_of(asked.task, asked.override)
    question = _question(asked)
    from lockstep.training.resolve import resolve, short_name

    source = partial(resolve, place, overrides)
    if asked.profile is None:
        warn_if_busy()
    try:
        _answer(asked, question, source, short_name(place))
    except WorkerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(ExitCode.FAILED) from None


def _question(asked: Asked) -> Question:
    """Refuses at once what would be found out after the measurement."""
    from lockstep.plan.links.connection import HERE, connection

    counts, method = asked.counts("1,2,4,8"), asked.method()
    if asked.network == HERE:
        _check_here(asked, method)
    else:
        connection(asked.network, asked.nodes_of)
    from lockstep.plan.tasks.curve import Question
    from lockstep.plan.tasks.of_task import Scaling  # imports torch

    base = counts[0] if len(counts) > 1 else 1
    scaling = Scaling(base=base, weak=asked.weak, per_host=asked.per_host(), loaders=asked.loader_workers)
    _check_cores(scaling.on_host(counts[-1]))
    return Question(workers=counts, scaling=scaling, method=method, failures=asked.failures(), storage=asked.storage)


def _check_here(asked: Asked, method: Method) -> None:
    if asked.nodes_of != 1:
        raise UsageError(f"--nodes-of {asked.nodes_of} with --network here: this host is one node; leave it out")
    if method.update != "replicated" or method.local is not None or method.mesh is not None:
        raise UsageError(
            "--network here measures how replicas sum gradients in every step: name a network for other updates, local steps and meshes"
        )


def _check_cores(ranks: int) -> None:
    """Raise a UsageError for more ranks than could be started here, to hear how they talk."""
    from lockstep.cores import cores
    from lockstep.tuning.here import kind_of_device

    if kind_of_device() == "cpu" and ranks > (most := 8 * cores()):
        raise UsageError(
            f"{ranks} ranks on a host like this one would take turns on {cores()} cores: give at most {most} with --ranks-per-host, --nodes-of or, "
            "with --network here, --workers"
        )


def _answer(asked: Asked, question: Question, source: Callable[[], Task], name: str) -> None:
    from lockstep.plan.tasks.curve import curve
    from lockstep.plan.tasks.curve_text import plot, table
    from lockstep.plan.tasks.profile_text import describe
    from lockstep.plan.tasks.task_layouts import describe as layouts_text
    from lockstep.plan.tasks.task_layouts import layouts_of

    if asked.profile is None:
        _say_ratio(asked, question, source)
    profile = _profile(asked, question, source, name)
    print(describe(profile, question.scaling))
    joined = _joined(asked, question, profile)
    print(joined.words)
    found = curve(profile, question, joined)
    print(table(found))
    ranked = layouts_of(profile, question, joined)
    print(layouts_text(ranked, max(question.workers)), end="")
    more: dict[str, Any] = {}
    if asked.noise_scale:
        from lockstep.measure.noise_scale import noise_scale_of

        noise = noise_scale_of(source)
        print(noise.describe())
        more["noise_scale"] = noise.as_json()
    head = {"task": name, "network": joined.words, "base": question.scaling.base, "weak": question.scaling.weak}
    write_json(
        asked.json_file, {**head, "rows": [row.as_json() for row in found.rows], "layouts": [asdict(each) for each in ranked], **more}
    )
    if asked.plot is not None:
        plot(found, asked.plot)


def _say_ratio(asked: Asked, question: Question, source: Callable[[], Task]) -> None:
    """Communication to computation of this task. On this host sums are measured, and there is no link to divide by."""
    from lockstep.measure.ratio_of_task import ratio_of_task
    from lockstep.plan.links.connection import HERE, connection

    if asked.network != HERE and question.method.mesh is None:
        link = connection(asked.network).network.between
        found = ratio_of_task(source, max(question.workers), network=link, method=question.method, told=_told(asked))
        print(f"{found.describe()}\n")


def _told(asked: Asked) -> str:
    """The method, as it was written."""
    given = {"--reduce": asked.reduce if asked.reduce != "auto" else None, "--compress": asked.compress, "--sync-every": asked.sync_every}
    given |= {"--outer": asked.outer, "--update": asked.update if asked.update != "replicated" else None, "--staleness": asked.staleness}
    return " ".join(f"{option} {value}" for option, value in given.items() if value is not None) or "native"


def _profile(asked: Asked, question: Question, source: Callable[[], Task], name: str) -> Profile:
    """From the file, or measured now."""
    from lockstep.cores import cores
    from lockstep.plan.links.connection import HERE
    from lockstep.plan.tasks.of_task import sides, slots_of, talking
    from lockstep.plan.tasks.profile import Profile
    from lockstep.plan.tasks.profiling import profile
    from lockstep.tuning.here import kind_of_device

    task = source()
    if asked.profile is None:
        scaling, counts, device = question.scaling, question.workers, kind_of_device()
        heard = [] if asked.network == HERE else talking(scaling, counts, device)
        found = profile(source, sides(scaling, counts, slots_of(task), cores(), device), asked.seconds, talking=heard)
        if asked.save_profile is not None:
            found.write(asked.save_profile)
        return found
    found = Profile.read(asked.profile)
    if (found.task, found.global_batch, found.micro_batch) != (name, task.global_batch, task.micro_batch):
        raise UsageError(
            f"--profile {asked.profile} is of {found.task} (global_batch={found.global_batch}, micro_batch={found.micro_batch}), and the plan of "
            f"{name} (global_batch={task.global_batch}, micro_batch={task.micro_batch}): leave it out, or plan what was profiled"
        )
    return found


def _joined(asked: Asked, question: Question, profile: Profile) -> Connection | ThisHost:
    """What connects the ranks; on this host it is measured now."""
    from lockstep.plan.links.connection import HERE, connection
    from lockstep.plan.links.here import on_this_host

    if asked.network != HERE:
        return connection(asked.network, asked.nodes_of)
    largest = max(each.elements for each in profile.buckets) * profile.width
    return on_this_host(sorted({*question.workers, question.scaling.base}), largest, question.method)
