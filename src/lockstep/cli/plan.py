"""`lockstep plan`: how long a step would take on ranks and a network that need not be there."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli import plan_methods, plan_model, plan_task
from lockstep.cli.options import GivenNames, Only
from lockstep.cli.plan_options import METHOD, PlanChoice, check_together
from lockstep.config.launching import RunChoice
from lockstep.config.parallelism import Parallelism
from lockstep.config.settings import Config


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
            help="digits, text, or a Python file whose task() returns a lockstep.Task.",
        ),
    ] = None,
) -> None:
    """Predict the step of TASK, or of a --model of the table, for any number of workers on any
    network.

    A rank of the task is profiled here: its phases, and when each bucket of gradients is complete.
    The step is then simulated: buckets go over the link one after the other, all wait for the
    slowest of W ranks, and loaders and storage are shared.
    """
    kind = check_together(task, asked, given)
    if kind == "model":
        plan_model.run(asked, method)
        return
    assert task is not None
    if kind == "methods":
        plan_methods.run(asked, task, choice.overrides)
    else:
        plan_task.run(asked, task, choice.overrides, method, config.loader_workers)
