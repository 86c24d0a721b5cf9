"""What the plan foretells of published trainings, beside what was published; and how far each
constant would move it.

    python benchmarks/published.py [--json FILE]

Nothing runs but arithmetic. The constants are those of `lockstep plan --model`: one of a device, a
family of models or a kind of link, none of a case. A case brings what its publication says of
itself: model, device, samples a device, servers and their links, layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.collectives.network import Link, Network
from lockstep.config.mesh import Mesh
from lockstep.config.parallelism import Parallelism
from lockstep.tools.plan.model_plan import NCCL, work_of_model
from lockstep.tools.plan.model_table import device_named, model_named
from lockstep.tools.plan.networks import nvlink, pcie
from lockstep.tools.plan.simulate import simulate
from lockstep.tools.plan.work import RankWork
from lockstep.tools.timing.output_files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One published efficiency, and what its publication says of the training."""

    name: str
    source: str
    model: str
    device: str
    batch: int
    network: Network
    base: int
    """Devices that the efficiency is relative to."""
    workers: int
    sharded: bool
    efficiency: float


_HOROVOD = (
    "Horovod, docs/benchmarks.rst: 128 servers of 4 Pascal GPUs, RoCE at 25 Gbit/s, 64 images a"
    " GPU; relative to one GPU"
)
CASES = (
    *(
        Case(
            name=f"Horovod, {model}",
            source=_HOROVOD,
            model=model,
            device="p100",
            batch=64,
            network=pcie(4, gbit=25),
            base=1,
            workers=512,
            sharded=False,
            efficiency=efficiency,
        )
        for model, efficiency in (("inception-v3", 0.90), ("resnet101", 0.90), ("vgg16", 0.68))
    ),
    Case(
        name="Goyal, resnet50",
        source=(
            "Goyal et al., 2017 (arXiv 1706.02677), abstract and section 4: 8 P100 a server with"
            " NVLink, Ethernet at 50 Gbit/s, 32 images a GPU"
        ),
        model="resnet50",
        device="p100",
        batch=32,
        network=nvlink(8, gigabytes=80, gbit=50),
        base=8,
        workers=256,
        sharded=False,
        efficiency=0.90,
    ),
    Case(
        name="torchtitan, llama-8b",
        source=(
            "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: FSDP and"
            " compile, 6,667 and 6,514 tokens/s; 400 Gbit/s a GPU"
        ),
        model="llama-8b",
        device="h100",
        batch=2,
        network=nvlink(8, gigabytes=450, gbit=8 * 400),
        base=8,
        workers=128,
        sharded=True,
        efficiency=0.977,
    ),
)

Change = Callable[[RankWork, Network], tuple[RankWork, Network]]


def efficiency(case: Case, change: Change = lambda work, network: (work, network)) -> float:
    """Throughput of a device among all of them, over that among the base's. `change` moves a
    constant for both.
    """
    work = work_of_model(
        model_named(case.model), device_named(case.device), batch=case.batch, sharded=case.sharded
    )
    work, network = change(work, case.network)
    few, many = (
        simulate(
            work,
            workers,
            network,
            Parallelism(mesh=Mesh(shard=workers)) if case.sharded else Parallelism(),
            NCCL,
        ).step
        for workers in (case.base, case.workers)
    )
    return few / many


def changes(factor: float) -> dict[str, Change]:
    """Each constant, taken times `factor`."""

    def links(network: Network, of: Callable[[Link], Link]) -> Network:
        return replace(network, within=of(network.within), between=of(network.between))

    return {
        "achieved rate": lambda work, network: (
            replace(work, forward=work.forward / factor, backward=work.backward / factor),
            network,
        ),
        "backward / forward": lambda work, network: (_divided(work, factor), network),
        "gradient bytes": lambda work, network: (replace(work, width=factor * work.width), network),
        "spread of devices": lambda work, network: (
            replace(work, spread=factor * work.spread),
            network,
        ),
        "bandwidth between": lambda work, network: (
            work,
            replace(network, between=_faster(network.between, factor)),
        ),
        "bandwidth within": lambda work, network: (
            work,
            replace(network, within=_faster(network.within, factor)),
        ),
        "latency": lambda work, network: (
            work,
            links(network, lambda link: Link(factor * link.latency, link.bandwidth)),
        ),
    }


def _faster(link: Link, factor: float) -> Link:
    return Link(link.latency, factor * link.bandwidth)


def _divided(work: RankWork, factor: float) -> RankWork:
    """The same computation, another share of it in the backward."""
    ratio = factor * work.backward / work.forward
    whole = work.forward + work.backward
    return replace(work, forward=whole / (1 + ratio), backward=whole * ratio / (1 + ratio))


def table(cases: Sequence[Case]) -> str:
    """Predicted and published, then a row for each constant: predicted with 0.8 and with 1.2 of
    it.
    """
    columns = [max(12, len(case.name)) for case in cases]
    lines = [
        "efficiency".ljust(20)
        + "".join(f"  {case.name:>{width}}" for case, width in zip(cases, columns, strict=True))
    ]

    def row(name: str, texts: Sequence[str]) -> None:
        lines.append(
            name.ljust(20)
            + "".join(f"  {text:>{width}}" for text, width in zip(texts, columns, strict=True))
        )

    row("devices", [f"{case.base} -> {case.workers}" for case in cases])
    row("published", [f"{100 * case.efficiency:.1f} %" for case in cases])
    row("predicted", [f"{100 * efficiency(case):.1f} %" for case in cases])
    row("error, points", [f"{100 * (efficiency(case) - case.efficiency):+.1f}" for case in cases])
    low, high = changes(0.8), changes(1.2)
    for name in low:
        row(
            f"{name} +-20 %",
            [
                f"{100 * efficiency(case, low[name]):.1f} .."
                f" {100 * efficiency(case, high[name]):.1f}"
                for case in cases
            ],
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    print(table(CASES))
    found = [
        {
            "case": case.name,
            "source": case.source,
            "published": case.efficiency,
            "predicted": efficiency(case),
            "moved": {
                name: [efficiency(case, changes(factor)[name]) for factor in (0.8, 1.2)]
                for name in changes(1.0)
            },
        }
        for case in CASES
    ]
    write_json(given.json, found)


if __name__ == "__main__":
    main()
