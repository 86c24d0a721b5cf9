"""Rules for data: random data that differs between ranks, copies that block, samples counted twice,
and an order that is the same in each epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.lint.conditions import definition
from lockstep.tools.lint.script import (
    Loop,
    Problem,
    Script,
    argument,
    collective,
    dotted,
    is_torch_class,
    last_name,
    parameter,
    without_gradients,
)

_DRAWS = re.compile(r"torch\.(randn|rand|randint|normal|randperm)")
_SEEDS = re.compile(r"(manual_)?seed(_all|_everything)?|set_seed")
_DEVICE = re.compile(r"|[\w.]*device[\w.]*|([\w.]+\.)?(local_)?rank|\d+|f?['\"]cuda.*")
_MEASURES = re.compile(r"dist\.(all_reduce|reduce|(all_)?gather(_object|_into_tensor)?)")
_ONLY_WALKS = re.compile(
    r"len|enumerate|zip|iter|islice|tqdm|print|DataLoader|BatchSampler|range|isinstance|min|max"
)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The calls that make a DistributedSampler (`call`) and its loader (`made`), with their names.
    `name` is "" for a sampler that is made inside the loader's call.
    """

    call: cst.Call
    name: str
    loader: str
    made: cst.Call


def forgotten_set_epoch(script: Script) -> Iterator[Problem]:
    samplers = [each for each in distributed_samplers(script) if _shuffles(script, each.call)]
    for sampler in samplers:
        rest = [each for each in samplers if each is not sampler]
        others = {name for each in rest for name in (each.name, f"{each.loader}.sampler")}
        loops: list[Loop] = [*script.all(cst.For), *script.all(cst.While)]
        if _may_be_told(script, sampler, others):
            continue
        if any(_is_epochs(script, loop, sampler) for loop in loops):
            yield Problem(sampler.call, {"sampler": sampler.name or f"{sampler.loader}.sampler"})


def distributed_samplers(script: Script) -> Iterator[Sampler]:
    """Yield the samplers of loaders whose names have one binding only. A loader that is bound
    again may be accelerate's wrapper, which may call set_epoch itself.
    """
    for made in script.all(cst.Call):
        loader = script.assigned(made)
        if last_name(made) != "DataLoader" or len(script.lookup(loader, made)) != 1:
            continue
        given = argument(made, "sampler") or argument(made, "batch_sampler")
        if isinstance(given, cst.Call) and last_name(given) == "BatchSampler":
            given = argument(given, "sampler", 0)
        name = dotted(given)
        values = [bound.value for bound in script.lookup(name, made)] if name else [given]
        values = [each.body if isinstance(each, cst.IfExp) else each for each in values]
        calls = [each for each in values if isinstance(each, cst.Call)]
        rest = {script.text(each) for each in values if each not in calls}
        if len(calls) == 1 and rest <= {"", "None"} and _is_distributed(script, calls[0]):
            yield Sampler(calls[0], name, loader, made)


def _is_distributed(script: Script, call: cst.Call) -> bool:
    ours = re.fullmatch(r"lockstep\.(.+\.)?DistributedSampler", script.name(call.func))
    return bool(ours) or is_torch_class(script, call.func, ("DistributedSampler",))


def _shuffles(script: Script, call: cst.Call) -> bool:
    return script.text(argument(call, "shuffle", 3)) in ("", "True")


def _may_be_told(script: Script, sampler: Sampler, others: set[str]) -> bool:
    """Whether the sampler may be given the epoch: by a set_epoch that is not certainly for another
    sampler, or by `.epoch = ...`.
    """
    methods = [node for node in script.all(cst.Attribute) if last_name(node) == "set_epoch"]
    written = [dotted(node.target) for node in script.all(cst.AssignTarget)]
    by_hand = re.compile(rf"{sampler.name}\.epoch|.*\.sampler\.epoch")
    told = {dotted(node.value) for node in methods}
    return not told <= others or any(by_hand.fullmatch(each) for each in written)


def _is_epochs(script: Script, loop: Loop, sampler: Sampler) -> bool:
    """Whether the loop trains on the loader repeatedly, and passes it to no function outside this
    file.
    """
    once = isinstance(loop, cst.For) and re.fullmatch(r"range\((.*, ?)?1\)", script.text(loop.iter))
    made, loader = sampler.made, sampler.loader
    if once or script.inside(made, loop) or not script.same(loader, loop, made):
        return False
    trains = _trains_on(script, loop.body, loader)
    for call in script.calls(loop):
        given = [dotted(arg.value) for arg in call.args]
        handed = {loader, sampler.name or loader} & set(given)
        if not handed or _ONLY_WALKS.fullmatch(last_name(call)):
            continue
        function = script.called(call)
        if function is None:
            return False  # it may call set_epoch
        if loader in given:
            place = given.index(loader)
            keyword = call.args[place].keyword
            named = keyword.value if keyword else parameter(function, place)
            trains |= _trains_on(script, function, named)
    return trains


def _trains_on(script: Script, root: cst.CSTNode, loader: str) -> bool:
    """Whether `root` has a loop over the loader with a backward in it."""
    loops = [loop for loop in script.within(root, cst.For) if loader in script.names(loop.iter)]
    return any(script.calls(loop, "backward") for loop in loops)


def unseeded_data(script: Script) -> Iterator[Problem]:
    calls = script.all(cst.Call)
    if any(_SEEDS.fullmatch(last_name(call)) for call in calls):
        return
    shared = [call for call in calls if last_name(call) == "DistributedSampler"]
    for data in (argument(call, "dataset", 0) for call in shared):
        for draw in _draws(script, data) if data is not None else ():
            yield Problem(draw, {"draw": script.text(draw.func)})


def _draws(script: Script, node: cst.BaseExpression, depth: int = 4) -> Iterator[cst.Call]:
    """Yield the random tensors without a generator in an expression and in the values of its
    names.
    """
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
                yield Problem(call, {"copy": last_name(call)}, fix)


def _loops_over(script: Script, made: cst.Call) -> list[cst.For]:
    """The loops over the loader that a call makes."""
    loader = script.assigned(made)
    loops = [loop for loop in script.all(cst.For) if loader in script.names(loop.iter)]
    return [loop for loop in loops if script.same(loader, loop, made)]


def _copies(script: Script, loop: cst.For) -> Iterator[cst.Call]:
    """Yield the blocking copies of the batch to a device."""
    batch = script.names(loop.target)
    for parts in script.within(loop, cst.CompFor):
        batch |= script.names(parts.target) if batch & script.names(parts.iter) else set()
    for call in script.calls(loop, "to", "cuda"):
        moves = _DEVICE.fullmatch(script.text(argument(call, "device", 0)))
        waits = argument(call, "non_blocking", 1) is None
        if moves and waits and dotted(call.func).split(".")[0] in batch:
            yield call


def padded_metric(script: Script) -> Iterator[Problem]:
    for gather in script.all(cst.Attribute):
        if not re.fullmatch(r"(.+\.)?accelerator\.gather", dotted(gather)):
            continue
        if script.loops(gather) and without_gradients(script, gather):
            fix = gather.with_changes(attr=cst.Name("gather_for_metrics"))
            yield Problem(gather, {"source": "the loader behind gather()"}, fix)
    for sampler in distributed_samplers(script):
        padded = script.text(argument(sampler.call, "drop_last", 5)) != "True"
        for call in _measured(script, sampler.made) if padded else ():
            yield Problem(call, {"source": f"the sampler of {sampler.loader}"})


def _measured(script: Script, made: cst.Call) -> Iterator[cst.Call]:
    """The first collective in or after each loop that evaluates on the loader."""
    for loop in _loops_over(script, made):
        evaluates = any(without_gradients(script, each) for each in (loop, *script.calls(loop)))
        later = [call for call in script.calls(script.scope(loop)) if script.before(loop, call)]
        summed = [call for call in later if _MEASURES.fullmatch(collective(script, call))]
        if evaluates and not script.calls(loop, "backward"):
            yield from summed[:1]
