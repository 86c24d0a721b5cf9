"""What efficiency is to be expected, from one rank's work measured alone and the link between two ranks: no step that it is compared with goes in.

What the fullest of n ranks computes is measured on one rank alone, with its share of the batch and its threads; where there are more threads
than cores it takes so many times longer. What ranks then say to each other, and what of it is hidden, is simulated (plan/simulation/simulate.py).

What ranks take from each other otherwise, memory bandwidth, caches and a processor's clock, and how long they wait for a slow one, is in no
term: where measured and predicted part, that is the finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.collectives.network import Link, Network
from lockstep.gradients.facts import numbers
from lockstep.method import Method
from lockstep.plan.links.carriers import Cost, OneHost
from lockstep.plan.methods.cost import BACKWARD
from lockstep.plan.simulation.simulate import simulate
from lockstep.plan.simulation.work import Leaves, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a prediction is made from."""

    method: Method
    buckets: Sequence[Leaves]
    """Of gradients, in the order in which they leave."""
    width: int
    """Bytes of an element of a gradient."""
    buffers: int
    """Bytes that ranks average after every step."""
    link: Link | None
    """None where every world has one rank: nothing is sent."""
    overlaps: bool
    """Whether gradients can travel while the backward goes on: not in shared memory."""
    cores: int | None
    """That ranks share; None on GPUs, of which each has its own."""


def step_seconds(known: Measured, *, workers: int, alone: float, micro_batches: int, threads: int) -> float:
    """Of a step of so many workers. `alone`: seconds of what the fullest of them computes, by one rank alone."""
    crowded = 1.0 if known.cores is None else max(1.0, workers * threads / known.cores)
    if workers == 1 or known.link is None:
        return alone * crowded
    each = alone * crowded / micro_batches
    work = Work(
        forward=(1 - BACKWARD) * each,
        backward=BACKWARD * each,
        micro_batches=micro_batches,
        buckets=known.buckets,
        width=known.width,
        facts=8 * numbers(workers),
        buffers=known.buffers,
    )
    network = Network.flat(known.link.latency, known.link.bandwidth) if known.overlaps else _shared_memory(known.link, workers)
    return simulate(work, workers, network, known.method).step


def _shared_memory(link: Link, workers: int) -> OneHost:
    """What the copies and meetings of so many ranks cost, if they cost what those of a ring over this link would."""
    messages, passes = 2 * (workers - 1), 2 * (workers - 1) / workers
    latency = messages * link.latency
    return OneHost({workers: Cost(latency, passes / link.bandwidth, messages, passes)}, {workers: latency})
