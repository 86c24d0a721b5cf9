"""`lockstep plan --model M --device D`: a model of the table on devices of the table."""

from __future__ import annotations

from dataclasses import replace

from lockstep.cli.plan_options import Asked
from lockstep.errors import UsageError
from lockstep.measure.files import check_writable, write_json


def run(asked: Asked) -> None:
    """What fits, and how long a step takes in the layouts that do."""
    if asked.device is None:
        raise UsageError(f"--model {asked.model} needs a --device: p100, v100, rtx4090, a100-80g, h100 or h200")
    assert asked.model is not None
    from lockstep.method import Method
    from lockstep.plan.links.connection import HERE, connection
    from lockstep.plan.models.devices import device_named
    from lockstep.plan.models.known import model_named

    if asked.network == HERE:
        raise UsageError("--network here is of this host's own ranks: name a network for devices that are elsewhere, such as NVLink+IB")
    model, device = model_named(asked.model), device_named(asked.device)
    found_network = connection(asked.network, asked.nodes_of)
    check_writable(asked.json_file, "--json")
    chosen = asked.method()
    counts = asked.counts("1..64")
    from lockstep.plan.models.of_model import NCCL, plan_model  # imports torch
    from lockstep.plan.models.text import describe

    plan = plan_model(
        model,
        device,
        counts,
        found_network.network,
        batch=asked.batch,
        method=None if chosen == Method() else chosen,
        assumed=replace(NCCL, link_error=found_network.error),
    )
    print(found_network.words)
    print(describe(plan))
    write_json(asked.json_file, {"model": model.name, "device": device.name, "network": found_network.words, "rows": plan.as_json()})
