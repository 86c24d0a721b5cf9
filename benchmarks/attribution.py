"""Does the verdict name the rank that is slow, and where? One of four ranks is 200 ms slower a
step, in each of five places, on each of several ranks.

    sudo python benchmarks/attribution.py --times 5

Loader, forward, backward and optimizer sleep on one rank of this host (planted_task.py). The
network is a real one: every rank has a host of its own, a namespace of this machine (namespaces.py;
root, ip and tc), and one host's link is so slow that a step takes 200 ms more. Every case is one
`lockstep train`, read as `lockstep report` reads it. Exits with 1 where one was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import namespaces
from lockstep.tools.report.verdict import Verdict, verdict
from lockstep.training.timeline import read

PLACES = ("loader", "forward", "backward", "optimizer", "network")
CAUSES = {"loader": "data"}
WORKERS = 4
TASK = Path(__file__).with_name("planted_task.py")
# at 10 Mbit/s the 240 kB that a ring sends of the gradients take 190 ms
_SLOW, _QUICK = "10mbit", "1gbit"


@dataclass(frozen=True, slots=True)
class Case:
    """What was planted, and what was said."""

    place: str
    rank: int
    right: bool
    said: str


def train_here(place: str, rank: int, steps: int, run: Path) -> None:
    planted = [f"--set=where={place}", f"--set=rank={rank}"]
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "train",
        str(TASK),
        "--workers",
        str(WORKERS),
        f"--steps={steps}",
        f"--run={run}",
        *planted,
    ]
    subprocess.run(words, check=True, capture_output=True)


def train_on_hosts(slow: int, steps: int, run: Path) -> None:
    """A rank on each host, of which one has a slow link."""
    with namespaces.hosts(WORKERS, _QUICK) as hosts:
        namespaces.change_rate(hosts[slow], slow, _SLOW)
        started = []
        for rank, host in enumerate(hosts):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": namespaces.INTERFACE,
                # each host takes itself for the only one that has these cores
                "OMP_NUM_THREADS": "1",
            }
            words = [
                sys.executable,
                "-m",
                "lockstep",
                "train",
                str(TASK),
                f"--steps={steps}",
                f"--run={run}",
            ]
            started.append(host.start(words, environment=environment, log=f"{run}.{rank}.log"))
        for rank, process in enumerate(started):
            if process.wait():
                raise RuntimeError(f"rank {rank}: {Path(f'{run}.{rank}.log').read_text()}")


def judge(place: str, rank: int, found: Verdict) -> Case:
    if place == "network":
        named = (
            found.slow_link is not None
            and found.slow_link.ranks == (rank,)
            and not found.stragglers
        )
    else:
        named = [(each.place, each.cause) for each in found.stragglers] == [
            (rank, CAUSES.get(place, place))
        ]
    return Case(place, rank, named, found.reasons()[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--times",
        type=int,
        default=5,
        help="of each place, each time another rank where there are as many",
    )
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    cases = []
    for place in options.places.split(","):
        for rank in [draw.randrange(WORKERS) for _ in range(options.times)]:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                if place == "network":
                    train_on_hosts(rank, options.steps, run)
                else:
                    train_here(place, rank, options.steps, run)
                anatomy = read(run)
            assert anatomy is not None
            found = verdict(anatomy)
            assert found is not None
            cases.append(judge(place, rank, found))
            print(
                f"{'right' if cases[-1].right else 'WRONG'}  {place} of rank {rank}:"
                f" {cases[-1].said}",
                flush=True,
            )
    for place in options.places.split(","):
        mine = [case.right for case in cases if case.place == place]
        print(f"{place:<10} {sum(mine)} of {len(mine)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    sys.exit(not all(case.right for case in cases))


if __name__ == "__main__":
    main()
