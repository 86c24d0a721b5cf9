"""`lockstep plan --model M --device D`: a model of the table on devices of the table."""

from __future__ import annotations

from dataclasses import replace

from lockstep.cli.plan_options import PlanChoice
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError
from lockstep.tools.timing.output_files import check_writable, write_json


def run(asked: PlanChoice, chosen: Parallelism) -> None:
    """What fits, and how long a step takes in the layouts that do."""
    if asked.device is None:
        raise UsageError(
            "option-missing",
            option=f"--model {asked.model}",
            needed="--device NAME",
            reason="the plan is for p100, v100, rtx4090, a100-80g, h100 or h200",
        )
    assert asked.model is not None
    from lockstep.tools.plan.device_table import device_named
    from lockstep.tools.plan.model_table import model_named
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
