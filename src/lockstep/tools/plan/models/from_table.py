"""The work of one rank in a step, from the tables of models and devices: seconds of each pass,
and when which gradients are ready.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.gradients.layout import BUCKET
from lockstep.tools.plan.fabrics import DEVICE_SPREAD
from lockstep.tools.plan.models.device_table import Device
from lockstep.tools.plan.models.model_layers import Model
from lockstep.tools.plan.work import WIDTH, RankWork
from lockstep.tools.timing.profile import Leaves

BACKWARD = 2.0  # forwards: one product for the gradient of the inputs, one for that of the weights


def work_of_model(
    model: Model,
    device: Device,
    *,
    batch: int,
    micro_batches: int = 1,
    sharded: bool = False,
    recompute: bool = False,
) -> RankWork:
    """`batch`: samples of a micro-batch. `sharded`: layers travel one by one, not in buckets.
    `recompute`: the backward runs the forward again.
    """
    forward = batch * model.flops / device.achieved[model.family]
    return RankWork(
        forward=forward,
        backward=(BACKWARD + recompute) * forward,
        micro_batches=micro_batches,
        spread=DEVICE_SPREAD,
        buckets=tuple(_leaves(model, least=1 if sharded else BUCKET // WIDTH)),
        width=_sharded_width(device) if sharded else WIDTH,
        samples=batch * micro_batches,
        layers=model.blocks,
        activation=batch * model.tokens * model.width * (2 if device.mixed else 4),
    )


def _sharded_width(device: Device) -> float:
    """Bytes of an element, on the mean of its three ways: under mixed precision parameters are
    gathered twice in 16 bits, gradients scattered in 32.
    """
    return (2 + 2 + 4) / 3 if device.mixed else WIDTH


def _leaves(model: Model, least: int) -> Iterator[Leaves]:
    """Layers in the order of the backward, as many together as have `least` elements; ready when
    the last of them is computed.
    """
    done, elements = 0.0, 0
    for place, layer in enumerate(reversed(model.layers), 1):
        done += layer.flops
        elements += layer.parameters
        if elements >= least or (elements and place == len(model.layers)):
            yield Leaves(ready=min(1.0, done / model.flops), elements=elements)
            elements = 0
