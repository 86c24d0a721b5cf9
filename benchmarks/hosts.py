"""Two hosts with two ranks each: gradients by hierarchical reduction against the backend's own, in
turns, in one run.

    sudo python benchmarks/hosts.py --rates 1gbit,10gbit

The hosts are two network namespaces of this machine with a link of that rate between them (ip and
tc, from iproute2, and root). The ranks of all of them share its cores. A step is a forward, a
backward and an AdamW step of a model with 24 MiB of gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import lockstep
from cases import small_mlp
from lockstep.collectives.work import Work
from lockstep.gradients.reductions import Hierarchical
from lockstep.tools.timing.in_turns import Way, take_turns

HOSTS = ("10.77.0.1", "10.77.0.2")
WAYS = ("native", "hierarchical")
MIB = 2**20


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two network namespaces with a link between them."""
    names = ["lockstep-a", "lockstep-b"]
    links = ["lockstep-va", "lockstep-vb"]
    for name in names:
        _ip("netns", "add", name)
    try:
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, HOSTS, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            limit = ["rate", rate, "burst", "1mb", "latency", "50ms"]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit], check=True
            )
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def start_rank(
    rank: int, host: str, link: str, options: argparse.Namespace, out: Path
) -> subprocess.Popen[bytes]:
    node, local = divmod(rank, 2)
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "4",
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(node),
        "MASTER_ADDR": HOSTS[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": link,
    }
    words = [sys.executable, __file__, "--rank-writes", str(out), "--steps", str(options.steps)]
    return subprocess.Popen(["ip", "netns", "exec", host, *words], env=environment)


def measure(steps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds on the slowest rank of all-reduces of 1 and 24 MiB, and of whole steps."""
    with lockstep.init(backend="gloo") as world:
        steppers = {name: training(world, name) for name in WAYS}
        found: dict[str, dict[str, list[float]]] = {}
        for mib in (1, 24):
            tensor = torch.zeros(mib * MIB // 4)
            over = Hierarchical(world.group)
            over.allocate([tensor.numel()], [torch.float32])
            ways: tuple[Way, Way] = (
                partial(_wait, world.group.all_reduce, tensor),
                partial(_wait, over.start_sum, 0, "in a benchmark"),
            )
            found[f"all-reduce {mib} MiB"] = take_turns(
                dict(zip(WAYS, ways, strict=True)), steps, world
            )
        found["step, 24 MiB"] = take_turns(steppers, steps, world)
        return found


def _wait(start: Callable[..., Work], *arguments: object) -> None:
    start(*arguments).wait()


def training(world: lockstep.World, reduce: str) -> Way:
    torch.manual_seed(0)
    model = small_mlp()
    stepper = lockstep.Stepper(
        model, torch.optim.AdamW(model.parameters(), fused=True), reduce=reduce, world=world
    )
    generator = torch.Generator().manual_seed(world.rank)

    def step() -> None:
        batch = (
            torch.randn(32, 1024, generator=generator),
            torch.randint(0, 1024, (32,), generator=generator),
        )
        for x, y in stepper.micro_batches([batch]):
            stepper.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        stepper.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1gbit,10gbit", help="of the link, as tc writes them")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-writes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_writes is not None:
        found = measure(options.steps)
        if os.environ["RANK"] == "0":
            options.rank_writes.write_text(json.dumps(found))
        return
    report = {}
    for rate in options.rates.split(","):
        out = Path(f"hosts-{os.getpid()}.json")
        with two_hosts(rate) as hosts:
            ranks = [
                start_rank(
                    rank, hosts[rank // 2], ("lockstep-va", "lockstep-vb")[rank // 2], options, out
                )
                for rank in range(4)
            ]
            codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit(f"the ranks ended with codes {codes}")
        report[rate] = json.loads(out.read_text())
        out.unlink()
        print(f"link of {rate}, 2 hosts x 2 ranks, {options.steps} runs each")
        for what, seconds in report[rate].items():
            native, ours = (statistics.median(seconds[name]) for name in WAYS)
            print(
                f"  {what:<20} native {1e3 * native:8.1f} ms   hierarchical {1e3 * ours:8.1f} ms  "
                f" native / it {native / ours:5.2f}"
            )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
