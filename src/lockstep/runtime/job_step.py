"""Where the tasks of a SLURM job step meet, and what scripts written for torchrun want to read.
Pure.

Nobody needs to be asked: every rank computes host and port from its own environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.errors import UsageError
from lockstep.runtime import slurm
from lockstep.runtime.environment import Placement
from lockstep.runtime.slurm import Step

_ENTRY = re.compile(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+")


def step_of(place: Placement, env: Mapping[str, str]) -> Step | None:
    """The job step whose task `place` is, unless MASTER_ADDR or MASTER_PORT name another place
    to meet.
    """
    if place.source == "arguments":
        return None
    try:
        step = slurm.step(env)
    except UsageError:  # another launcher's ranks, in a job's shell
        return None
    if step is None or (step.rank, step.size) != (place.rank, place.size):
        return None
    given = (env.get("MASTER_ADDR"), env.get("MASTER_PORT"))
    return step if given in ((None, None), address(step)) else None


def address(step: Step) -> tuple[str, str]:
    """MASTER_ADDR and MASTER_PORT of a step. Raises UsageError where SLURM names no hosts."""
    if step.local_size == step.size:
        return "127.0.0.1", str(step.port)
    if not step.nodelist:
        raise UsageError(
            "rank-0-host-unknown",
            source="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST",
            size=step.size,
        )
    return first_host(step.nodelist), str(step.port)


def first_host(nodelist: str) -> str:
    """Where rank 0 of a job runs that has `nodelist`, as SLURM writes it: n03 of `n[03-04,07],b2`.

    `scontrol show hostnames` says the same, but is not there in every container, and costs a
    process in every rank.
    """
    first = _ENTRY.match(nodelist.lstrip(","))
    if first is None or not _ENTRY.sub("", nodelist).strip(",") == "":
        raise UsageError(
            "slurm-list-unreadable", name="nodelist", value=nodelist, form="n[01-03,07],b2"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def exported(place: Placement, env: Mapping[str, str]) -> dict[str, str]:
    """What scripts for torchrun read, for a rank that another launcher has started: variables to
    add to `env`.
    """
    found = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "GROUP_RANK": place.node,
    }
    values = {name: str(value) for name, value in found.items()}
    step = step_of(place, env)
    if step is not None:
        values["MASTER_ADDR"], values["MASTER_PORT"] = address(step)
    return {name: value for name, value in values.items() if name not in env}
