"""A plan of a model from the table as text: what fits, then a row for each number of devices."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.plan.models.devices import Device
from lockstep.plan.models.fits import RESERVED, Least, least_devices, too_large
from lockstep.plan.models.layers import Model
from lockstep.plan.models.layouts import name_of
from lockstep.plan.models.of_model import ModelPlan, Planned

_OTHERS = 2  # layouts that are shown behind the quickest


def describe(plan: ModelPlan) -> str:
    return "\n".join((*_model(plan.model, plan.device, plan.batch), "", *_fits(plan.model, plan.device, plan.batch), "", *_rows(plan)))


def _model(model: Model, device: Device, batch: int) -> Iterator[str]:
    images = model.tokens == 1
    several = "s" * (batch > 1)
    samples = f"{batch} image{several}" if images else f"{batch} sequence{several} of {model.tokens} tokens"
    work = f"{model.flops / 1e9:.3g} GFLOP an image" if images else f"{model.flops / model.tokens / 1e9:.3g} GFLOP a token"
    yield f"{model.name}: {_count(model.parameters)} parameters, {work} forward; {samples} a device and step"
    peak = device.half if device.mixed else device.fp32
    achieved = device.achieved[model.family]
    precision = "mixed precision" if device.mixed else "fp32"
    rate = f"{achieved / 1e12:.3g} of {peak / 1e12:.3g} TFLOP/s achieved by {model.family} models in {precision}"
    beyond = " (counted as direct convolutions; Winograd's algorithm needs fewer)" if achieved > peak else ""
    yield f"{device.name}: {_gigabytes(device.memory)} of memory, {rate}{beyond}"


def _fits(model: Model, device: Device, batch: int) -> Iterator[str]:
    yield f"{'layout':<28}{'devices':>9}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'in all':>10}   fits"
    for each in least_devices(model, device, batch=batch, recompute=bool(model.blocks)):
        yield _least(each, device)
    note = "activations recomputed but for the inputs of blocks; " if model.blocks else ""
    yield f"({note}Adam in fp32: 16 bytes a parameter; {_gigabytes(RESERVED)} set aside)"


def _least(found: Least, device: Device) -> str:
    held = found.memory
    wrong = too_large(held, device)
    fit = "yes" if not wrong else f"no: {', '.join(wrong)}"
    if found.devices is None and found.kind != "replicated":
        fit += ", on any number of devices"
    sizes = (
        f"{_gigabytes(held.weights):>10}{_gigabytes(held.gradients):>11}{_gigabytes(held.optimizer):>11}{_gigabytes(held.activations):>13}"
    )
    name = name_of(found.method) if found.devices and found.devices > 1 else found.kind
    return f"{name:<28}{found.devices or '-':>9}{sizes}{_gigabytes(held.total):>10}   {fit}"


def _rows(plan: ModelPlan) -> Iterator[str]:
    yield f"{'workers':>7}{'step':>11}{'8 of 10 lie in':>21}{'samples/s':>11}{'efficiency':>12}  {'limiting':<13}layout"
    for workers, found in plan.rows:
        if not found:
            yield f"{workers:>7}{'-':>11}  no layout fits: see above for the least number of devices"
        for place, each in enumerate(found[: 1 + _OTHERS]):
            yield (
                _row(each)
                if place == 0
                else f"{'':>7}{_ms(each.predicted.step):>11}{'':>32}{100 * each.efficiency:>10.1f} %  {'':<13}{each.name}"
            )


def _row(each: Planned) -> str:
    step = each.predicted
    between = f"{_ms(step.low)} .. {_ms(step.high)}"
    return f"{each.workers:>7}{_ms(step.step):>11}{between:>21}{each.samples_per_s:>11.4g}{100 * each.efficiency:>10.1f} %  {step.limiting:<13}{each.name}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 10 else f"{seconds:.4g} s"


def _gigabytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e6:.3g} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"
