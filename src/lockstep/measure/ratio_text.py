"""A communication ratio as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.measure.ratio import Accumulated, CommunicationRatio


def describe(found: CommunicationRatio) -> str:
    """Sizes, rates and times, the verdict, a row for each accumulation, advice."""
    return "\n".join(
        (
            _sizes(found),
            _computation(found),
            f"communication {_time(found.communication)} at {_link(found)}, of which {_time(found.hidden)} can travel behind the backward",
            f"communication / computation = {found.ratio:.3g}: {'' if found.significant else 'not '}significant (the limit is 0.1)",
            f"{'micro-batches':>13}{'a step sends':>14}{'a sample':>12}{'ratio':>9}{'exposed':>12}{'a step':>12}",
            *(_row(row) for row in found.rows),
            *(f"- {sentence}" for sentence in found.advice),
        )
    )


def _sizes(found: CommunicationRatio) -> str:
    method = "" if found.method == "native" else f" with {found.method}"
    sends = (
        f"each of {found.world_size} ranks sends {_bytes(found.bytes_sent)} a step" if found.world_size > 1 else "one rank sends nothing"
    )
    return f"{found.model}: {found.parameters} parameters, {_bytes(found.gradient_bytes)} of gradients; {sends}{method}"


def _computation(found: CommunicationRatio) -> str:
    count, samples = found.micro_batches, f"{found.samples} sample{'s' * (found.samples != 1)}"
    many = samples if count == 1 else f"{count} micro-batches of {samples}"
    parts = f"forward {_time(found.forward)}, backward {_time(found.backward)}{' each' * (count > 1)}"
    whole = f"computation {_time(found.computation)} for {many} ({parts}); "
    if found.device_rate is None:
        return whole + "no FLOPs counted, so no rate: the model has no matrix product, convolution or attention, and others are not counted"
    flops = f"{count * found.flops / 1e9:.4g} GFLOP in matrix products, convolutions and attention"
    return f"{whole}{flops}: {found.device_rate / 1e9:.4g} GFLOP/s here"


def _row(row: Accumulated) -> str:
    sizes = f"{row.micro_batches:>13}{_bytes(row.bytes_per_step):>14}{_bytes(row.bytes_per_sample):>12}"
    return f"{sizes}{row.ratio:>9.3g}{_time(row.exposed):>12}{_time(row.step):>12}"


def _link(found: CommunicationRatio) -> str:
    if math.isinf(found.link_rate):
        return "no limit"
    return f"{8e-6 * found.link_rate:g} Mbit/s and {1e6 * found.link_latency:g} us a message"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
