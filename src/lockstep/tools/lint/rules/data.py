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
    Value,
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
    """The calls that make a DistributedSampler (`call`) and its loader (`loader_call`), with their
    names. `name` is "" for a sampler that is made inside the loader's call.
    """

    call: cst.Call
    name: str
    loader: str
    loader_call: cst.Call


def forgotten_set_epoch(script: Script) -> Iterator[Problem]:
    samplers = []
    for sampler in distributed_samplers(script):
        if script.text(argument(sampler.call, "shuffle", 3)) in ("", "True"):
            samplers.append(sampler)
    loops: list[Loop] = [*script.all(cst.For), *script.all(cst.While)]
    for sampler in samplers:
        others = set()
        for other in samplers:
            if other is not sampler:
                others |= {other.name, f"{other.loader}.sampler"}
        if _may_get_epoch(script, sampler, others):
            continue
        if any(_is_epochs(script, loop, sampler) for loop in loops):
            yield Problem(sampler.call, {"sampler": sampler.name or f"{sampler.loader}.sampler"})


def distributed_samplers(script: Script) -> Iterator[Sampler]:
    """Yield the samplers of loaders whose names have one binding only. A loader that is bound
    again may be accelerate's wrapper, which may call set_epoch itself.
    """
    for loader_call in script.all(cst.Call):
        loader = script.assigned(loader_call)
        if last_name(loader_call) != "DataLoader" or len(script.lookup(loader, loader_call)) != 1:
            continue
        sampler = argument(loader_call, "sampler") or argument(loader_call, "batch_sampler")
        if isinstance(sampler, cst.Call) and last_name(sampler) == "BatchSampler":
            sampler = argument(sampler, "sampler", 0)
        name = dotted(sampler)
        values = [sampler]
        if name:
            values = [binding.value for binding in script.lookup(name, loader_call)]
        call = _only_call(script, values)
        if call is not None and _is_distributed(script, call):
            yield Sampler(call, name, loader, loader_call)


def _only_call(script: Script, values: list[Value]) -> cst.Call | None:
    """Return the only call among the values, if the others are None."""
    calls = []
    for value in values:
        if isinstance(value, cst.IfExp):
            value = value.body
        if isinstance(value, cst.Call):
            calls.append(value)
        elif script.text(value) not in ("", "None"):
            return None
    return calls[0] if len(calls) == 1 else None


def _is_distributed(script: Script, call: cst.Call) -> bool:
    if re.fullmatch(r"lockstep\.(.+\.)?DistributedSampler", script.name(call.func)):
        return True
    return is_torch_class(script, call.func, ("DistributedSampler",))


def _may_get_epoch(script: Script, sampler: Sampler, others: set[str]) -> bool:
    """Whether the sampler may be given the epoch: by a set_epoch that is not certainly for another
    sampler, or by `.epoch = ...`.
    """
    methods = [node for node in script.all(cst.Attribute) if last_name(node) == "set_epoch"]
    receivers = {dotted(node.value) for node in methods}
    if not receivers <= others:
        return True
    by_hand = re.compile(rf"{sampler.name}\.epoch|.*\.sampler\.epoch")
    written = [dotted(node.target) for node in script.all(cst.AssignTarget)]
    return any(by_hand.fullmatch(target) for target in written)


def _is_epochs(script: Script, loop: Loop, sampler: Sampler) -> bool:
    """Whether the loop trains on the loader repeatedly, and passes it to no function outside this
    file.
    """
    loader = sampler.loader
    once = isinstance(loop, cst.For) and re.fullmatch(r"range\((.*, ?)?1\)", script.text(loop.iter))
    if once or script.inside(sampler.loader_call, loop):
        return False
    if not script.same(loader, loop, sampler.loader_call):
        return False
    trains = _trains_on(script, loop.body, loader)
    for call in script.calls(loop):
        passed = [dotted(argument.value) for argument in call.args]
        handed = {loader, sampler.name or loader} & set(passed)
        if not handed or _ONLY_WALKS.fullmatch(last_name(call)):
            continue
        function = script.called(call)
        if function is None:
            return False  # it may call set_epoch
        if loader in passed:
            position = passed.index(loader)
            keyword = call.args[position].keyword
            name = keyword.value if keyword else parameter(function, position)
            trains |= _trains_on(script, function, name)
    return trains


def _trains_on(script: Script, root: cst.CSTNode, loader: str) -> bool:
    """Whether `root` has a loop over the loader with a backward in it."""
    loops = [loop for loop in script.within(root, cst.For) if loader in script.names(loop.iter)]
    return any(script.calls(loop, "backward") for loop in loops)


def unseeded_data(script: Script) -> Iterator[Problem]:
    calls = script.all(cst.Call)
    if any(_SEEDS.fullmatch(last_name(call)) for call in calls):
        return
    for call in calls:
        if last_name(call) != "DistributedSampler":
            continue
        dataset = argument(call, "dataset", 0)
        if dataset is not None:
            for draw in _draws(script, dataset):
                yield Problem(draw, {"draw": script.text(draw.func)})


def _draws(script: Script, node: cst.BaseExpression, depth: int = 4) -> Iterator[cst.Call]:
    """Yield the random tensors without a generator in an expression and in the values of its
    names.
    """
    for call in script.calls(node):
        if _DRAWS.fullmatch(script.name(call.func)) and argument(call, "generator") is None:
            yield call
    for name in script.within(node, cst.Name) if depth else ():
        meaning = definition(script, name)
        if meaning is not None:
            yield from _draws(script, meaning, depth - 1)


def blocking_copy(script: Script) -> Iterator[Problem]:
    for loader_call in script.all(cst.Call):
        if script.text(argument(loader_call, "pin_memory")) != "True":
            continue
        for loop in _loops_over(script, loader_call):
            for call in _copies(script, loop):
                call_with_it = cst.parse_expression("f(non_blocking=True)")
                non_blocking = cst.ensure_type(call_with_it, cst.Call).args
                fix = call.with_changes(args=[*call.args, *non_blocking])
                yield Problem(call, {"copy": last_name(call)}, fix)


def _loops_over(script: Script, loader_call: cst.Call) -> list[cst.For]:
    """The loops over the loader that a call makes."""
    loader = script.assigned(loader_call)
    loops = [loop for loop in script.all(cst.For) if loader in script.names(loop.iter)]
    return [loop for loop in loops if script.same(loader, loop, loader_call)]


def _copies(script: Script, loop: cst.For) -> Iterator[cst.Call]:
    """Yield the blocking copies of the batch to a device."""
    batch = script.names(loop.target)
    for parts in script.within(loop, cst.CompFor):
        if batch & script.names(parts.iter):
            batch |= script.names(parts.target)
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
        if script.text(argument(sampler.call, "drop_last", 5)) == "True":
            continue
        for call in _measured(script, sampler.loader_call):
            yield Problem(call, {"source": f"the sampler of {sampler.loader}"})


def _measured(script: Script, loader_call: cst.Call) -> Iterator[cst.Call]:
    """The first collective in or after each loop that evaluates on the loader."""
    for loop in _loops_over(script, loader_call):
        evaluates = any(without_gradients(script, node) for node in (loop, *script.calls(loop)))
        if not evaluates or script.calls(loop, "backward"):
            continue
        for call in script.calls(script.scope(loop)):
            if script.before(loop, call) and _MEASURES.fullmatch(collective(script, call)):
                yield call
                break
