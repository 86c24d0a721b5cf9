"""This host alone: what it has, and ranks on it that add up and measure."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch

from lockstep.errors import LaunchTimeout, WorkerFailed
from lockstep.launcher.launch import launch
from lockstep.tools.doctor import host, links, network, software, sums
from lockstep.tools.doctor.examined import Examined
from lockstep.tools.doctor.links import Link
from lockstep.tools.finding import judged
from lockstep.world.world import init

_PATIENCE = timedelta(seconds=120)  # for starting ranks and measuring, on a busy machine


def examine(workers: int) -> Examined:
    """Look at this host, and start that many ranks on it."""
    name = socket.gethostname()
    found = [
        *software.findings(),
        *host.findings(workers),
        network.own_name(name, network.addresses_of),
        network.used(network.interfaces(), "127.0.0.1", os.environ.get("GLOO_SOCKET_IFNAME")),
        network.loopback_port(),
    ]
    try:
        bad, algorithms, pairs = launch(_on_rank, workers, timeout=_PATIENCE)[0]
    except (WorkerFailed, LaunchTimeout) as error:
        found.append(judged("sums", f"{workers} ranks did not get through", fix=str(error)))
        return Examined(found, [])
    return Examined(
        [*found, sums.judge(bad, algorithms, workers, "rank"), links.judge(pairs, hosts=False)],
        pairs,
    )


def _on_rank() -> tuple[list[str], list[str], list[Link]]:
    workers = int(os.environ["WORLD_SIZE"])
    with init(
        backend=(
            "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= workers else "gloo"
        )
    ) as world:
        algorithms = ["native", *(["shared_memory"] if world.group.memory is not None else [])]
        bad = sums.wrong(world.group, world.device, algorithms)
        names = [f"rank {rank}" for rank in range(world.size)]
        return bad, algorithms, links.measure(world.group, names, world.device, hosts=False)
