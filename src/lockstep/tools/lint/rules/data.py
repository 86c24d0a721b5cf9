"""What ranks train and measure on: data drawn differently, copies that block, samples counted
twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from lockstep.tools.lint.conditions import definition
from lockstep.tools.lint.distributed import collective, without_gradients
from lockstep.tools.lint.rules.set_epoch import distributed_samplers
from lockstep.tools.lint.script import Problem, Script, argument, dotted, last_name

_DRAWS = re.compile(r"torch\.(randn|rand|randint|normal|randperm)")
_SEEDS = re.compile(r"(manual_)?seed(_all|_everything)?|set_seed")
_DEVICE = re.compile(r"|[\w.]*device[\w.]*|([\w.]+\.)?(local_)?rank|\d+|f?['\"]cuda.*")
_MEASURES = re.compile(r"dist\.(all_reduce|reduce|(all_)?gather(_object|_into_tensor)?)")


def unseeded_data(script: Script) -> Iterator[Problem]:
    calls = script.all(cst.Call)
    if any(_SEEDS.fullmatch(last_name(call)) for call in calls):
        return
    shared = [call for call in calls if last_name(call) == "DistributedSampler"]
    for data in (argument(call, "dataset", 0) for call in shared):
        for draw in _draws(script, data) if data is not None else ():
            wrong = f"{script.text(draw.func)} has no seed, so each rank draws other data"
            yield Problem(
                draw, wrong, "give it a generator with a seed, or call torch.manual_seed before"
            )


def _draws(script: Script, node: cst.BaseExpression, depth: int = 4) -> Iterator[cst.Call]:
    """The random tensors in an expression and in what its names stand for."""
    for call in script.calls(node):
        if _DRAWS.fullmatch(script.name(call.func)) and argument(call, "generator") is None:
            yield call
    for name in script.within(node, cst.Name) if depth else ():
        if (meaning := definition(script, name)) is not None:
            yield from _draws(script, meaning, depth - 1)


def blocking_copy(script: Script) -> Iterator[Problem]:
    for made in script.all(cst.Call):
        pinned = script.text(argument(made, "pin_memory")) == "True"
        for loop in _loops_over(script, made) if pinned else ():
            for call in _copies(script, loop):
                given = cst.ensure_type(cst.parse_expression("f(non_blocking=True)"), cst.Call).args
                fix = call.with_changes(args=[*call.args, *given])
                wrong = f"{last_name(call)}() waits for the copy, so pin_memory=True gains nothing"
                yield Problem(call, wrong, "pass non_blocking=True", fix)


def _loops_over(script: Script, made: cst.Call) -> list[cst.For]:
    """The loops over the loader that a call makes."""
    loader = script.assigned(made)
    loops = [loop for loop in script.all(cst.For) if loader in script.names(loop.iter)]
    return [loop for loop in loops if script.same(loader, loop, made)]


def _copies(script: Script, loop: cst.For) -> Iterator[cst.Call]:
    """Copies of the batch to a device that wait."""
    batch = script.names(loop.target)
    for parts in script.within(loop, cst.CompFor):
        batch |= script.names(parts.target) if batch & script.names(parts.iter) else set()
    for call in script.calls(loop, "to", "cuda"):
        moves = _DEVICE.fullmatch(script.text(argument(call, "device", 0)))
        waits = argument(call, "non_blocking", 1) is None
        if moves and waits and dotted(call.func).split(".")[0] in batch:
            yield call


def padded_metric(script: Script) -> Iterator[Problem]:
    wrong = "gather() keeps the samples that pad the last batch, so a metric counts them twice"
    for gather in script.all(cst.Attribute):
        if not re.fullmatch(r"(.+\.)?accelerator\.gather", dotted(gather)):
            continue
        if script.loops(gather) and without_gradients(script, gather):
            fix = gather.with_changes(attr=cst.Name("gather_for_metrics"))
            yield Problem(gather, wrong, "use gather_for_metrics()", fix)
    for sampler in distributed_samplers(script):
        padded = script.text(argument(sampler.call, "drop_last", 5)) != "True"
        for call in _measured(script, sampler.made) if padded else ():
            repeats = (
                f"the sampler of {sampler.loader} repeats samples until ranks have equally many"
            )
            advice = "leave out the repeated ones, or evaluate with lockstep.evaluate"
            yield Problem(call, f"{repeats}, so this metric counts some twice", advice)


def _measured(script: Script, made: cst.Call) -> Iterator[cst.Call]:
    """The first collective in or after each loop that evaluates on the loader."""
    for loop in _loops_over(script, made):
        evaluates = any(without_gradients(script, each) for each in (loop, *script.calls(loop)))
        later = [call for call in script.calls(script.scope(loop)) if script.before(loop, call)]
        summed = [call for call in later if _MEASURES.fullmatch(collective(script, call))]
        if evaluates and not script.calls(loop, "backward"):
            yield from summed[:1]
