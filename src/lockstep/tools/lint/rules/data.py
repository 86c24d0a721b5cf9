"""Rules for data: random data that differs between ranks, copies that block, samples counted twice,
and an order that is the same in each epoch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.tools.lint.conditions import is_constant
from lockstep.tools.lint.script import (
    Code,
    Loop,
    Problem,
    Script,
    Value,
    argument,
    arguments,
    dotted,
    last_name,
    of_epochs,
    parameter,
)
from lockstep.tools.lint.torch_names import collective, is_torch_class, without_gradients

_DRAWS = re.compile(r"torch\.(randn|rand|randint|normal|randperm)")
_SEEDS = re.compile(r"(manual_)?seed(_all|_everything)?|set_seed")
_DEVICE = re.compile(r"|[\w.]*device[\w.]*|([\w.]+\.)?(local_)?rank|\d+|f?['\"]cuda.*")
_MEASURES = re.compile(r"dist\.(all_reduce|reduce|(all_)?gather(_object|_into_tensor)?)")
_TRAINS = re.compile(r"backward|train|step|fit", re.IGNORECASE)
_ONLY_WALKS = re.compile(
    r"len|enumerate|zip|iter|islice|tqdm|print|DataLoader|BatchSampler|range|isinstance|min|max"
)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The calls that make a DistributedSampler (`call`) and its loader (`loader_call`), with their
    names. `name` is "" for a sampler that is made inside the loader's call.
    """

    call: ast.Call
    name: str
    loader: str
    loader_call: ast.Call


def forgotten_set_epoch(script: Script) -> Iterator[Problem]:
    samplers = []
    for sampler in distributed_samplers(script):
        if script.text(argument(sampler.call, "shuffle", 3)) in ("", "True"):
            samplers.append(sampler)
    loops: list[Loop] = [*script.all(ast.For), *script.all(ast.While)]
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
    for loader_call in script.all(ast.Call):
        loader = script.assigned(loader_call)
        if last_name(loader_call) != "DataLoader" or len(script.lookup(loader, loader_call)) != 1:
            continue
        sampler = argument(loader_call, "sampler") or argument(loader_call, "batch_sampler")
        if isinstance(sampler, ast.Call) and last_name(sampler) == "BatchSampler":
            sampler = argument(sampler, "sampler", 0)
        name = dotted(sampler)
        values = [sampler]
        if name:
            values = [binding.value for binding in script.lookup(name, loader_call)]
        call = _only_call(script, values)
        if call is not None and _is_distributed(script, call):
            yield Sampler(call, name, loader, loader_call)


def _only_call(script: Script, values: list[Value]) -> ast.Call | None:
    """Return the only call among the values, if the others are None."""
    calls = []
    for value in values:
        if isinstance(value, ast.IfExp):
            value = value.body
        if isinstance(value, ast.Call):
            calls.append(value)
        elif script.text(value) not in ("", "None"):
            return None
    return calls[0] if len(calls) == 1 else None


def _is_distributed(script: Script, call: ast.Call) -> bool:
    if re.fullmatch(r"lockstep\.(.+\.)?DistributedSampler", script.name(call.func)):
        return True
    return is_torch_class(script, call.func, ("DistributedSampler",))


def _may_get_epoch(script: Script, sampler: Sampler, others: set[str]) -> bool:
    """Whether the sampler may be given the epoch: by a set_epoch that is not certainly for another
    sampler, or by `.epoch = ...`.
    """
    receivers = set(re.findall(r"([\w.]*)\.set_epoch\b", script.source))
    by_hand = rf"\b({sampler.name or 'sampler'}|[\w.]+\.sampler)\.epoch\s*=[^=]"
    return not receivers <= others or re.search(by_hand, script.source) is not None


def _is_epochs(script: Script, loop: Loop, sampler: Sampler) -> bool:
    """Whether the loop trains on the loader repeatedly, and passes it to no function outside this
    file.
    """
    loader = sampler.loader
    once = isinstance(loop, ast.For) and re.fullmatch(r"range\((.*, )?1\)", script.text(loop.iter))
    if once or script.inside(sampler.loader_call, loop):
        return False
    if not script.same(loader, loop, sampler.loader_call):
        return False
    trains = _trains_on(script, loop.body, loader)
    for call in script.calls(loop):
        passed = {dotted(value): key for key, value in arguments(call).items()}
        if passed.keys().isdisjoint({loader, sampler.name or loader}):
            continue
        if _ONLY_WALKS.fullmatch(last_name(call)):
            continue
        function = script.called(call)
        if function is None:
            return False  # it may call set_epoch
        if loader in passed:
            trains |= _trains_on(script, function, parameter(function, passed[loader]))
    return trains


def _trains_on(script: Script, root: Code, loader: str) -> bool:
    """Whether `root` has a loop over the loader with a backward in it."""
    loops = [loop for loop in script.within(root, ast.For) if loader in script.names(loop.iter)]
    return any(script.calls(loop, "backward") for loop in loops)


def constant_seed(script: Script) -> Iterator[Problem]:
    for loop in script.all(ast.For):
        calls = script.calls(loop.body)
        training = [call for call in calls if _TRAINS.search(last_name(call))]
        if not training or not of_epochs(loop):
            continue
        draws = script.calls(loop.body, "randperm", "shuffle", "permutation")
        draws = [draw for draw in draws if script.before(draw, training[-1])]
        for call in script.calls(loop.body, "manual_seed", "seed"):
            seed = argument(call, "seed", 0)
            if seed is None or not is_constant(script, seed, loop):
                continue
            names = (script.assigned(call), _receiver(call), script.text(call))
            if any(_generator(script, draw) in names for draw in draws):
                yield Problem(call, {"seeding": script.text(call), "epoch": dotted(loop.target)})


def _generator(script: Script, draw: ast.Call) -> str:
    return script.text(argument(draw, "generator")) or _receiver(draw)


def _receiver(call: ast.Call) -> str:
    """`a.b` of `a.b.c(...)`"""
    return dotted(call.func).rpartition(".")[0]


def unseeded_data(script: Script) -> Iterator[Problem]:
    calls = script.all(ast.Call)
    if any(_SEEDS.fullmatch(last_name(call)) for call in calls):
        return
    for call in calls:
        if last_name(call) != "DistributedSampler":
            continue
        dataset = argument(call, "dataset", 0)
        if dataset is not None:
            for draw in _draws(script, dataset):
                yield Problem(draw, {"draw": script.text(draw.func)})


def _draws(script: Script, node: ast.expr, depth: int = 4) -> Iterator[ast.Call]:
    """Yield the random tensors without a generator in an expression and in the values of its
    names.
    """
    for call in script.calls(node):
        if _DRAWS.fullmatch(script.name(call.func)) and argument(call, "generator") is None:
            yield call
    for name in script.within(node, ast.Name) if depth else ():
        meaning = script.definition(name)
        if meaning is not None:
            yield from _draws(script, meaning, depth - 1)


def blocking_copy(script: Script) -> Iterator[Problem]:
    for loader_call in script.all(ast.Call):
        if script.text(argument(loader_call, "pin_memory")) != "True":
            continue
        for loop in _loops_over(script, loader_call):
            for call in _copies(script, loop):
                start = (ast.get_source_segment(script.source, call) or "")[:-1].rstrip(", \n")
                comma = "" if start.endswith("(") else ", "
                fix = None if "#" in start else f"{start}{comma}non_blocking=True)"
                yield Problem(call, {"copy": last_name(call)}, fix)


def _loops_over(script: Script, loader_call: ast.Call) -> list[ast.For]:
    """The loops over the loader that a call makes."""
    loader = script.assigned(loader_call)
    loops = [loop for loop in script.all(ast.For) if loader in script.names(loop.iter)]
    return [loop for loop in loops if script.same(loader, loop, loader_call)]


def _copies(script: Script, loop: ast.For) -> Iterator[ast.Call]:
    """Yield the blocking copies of the batch to a device."""
    batch = script.names(loop.target)
    for parts in script.within(loop, ast.comprehension):
        if batch & script.names(parts.iter):
            batch |= script.names(parts.target)
    for call in script.calls(loop, "to", "cuda"):
        moves = _DEVICE.fullmatch(script.text(argument(call, "device", 0)))
        waits = argument(call, "non_blocking", 1) is None
        if moves and waits and dotted(call.func).split(".")[0] in batch:
            yield call


def padded_metric(script: Script) -> Iterator[Problem]:
    for gather in script.all(ast.Attribute):
        if not re.fullmatch(r"(.+\.)?accelerator\.gather", dotted(gather)):
            continue
        if script.loops(gather) and without_gradients(script, gather):
            fix = f"{script.text(gather)}_for_metrics"
            yield Problem(gather, {"source": "the loader behind gather()"}, fix)
    for sampler in distributed_samplers(script):
        if script.text(argument(sampler.call, "drop_last", 5)) == "True":
            continue
        for call in _measured(script, sampler.loader_call):
            yield Problem(call, {"source": f"the sampler of {sampler.loader}"})


def _measured(script: Script, loader_call: ast.Call) -> Iterator[ast.Call]:
    """The first collective in or after each loop that evaluates on the loader."""
    for loop in _loops_over(script, loader_call):
        evaluates = any(without_gradients(script, node) for node in (loop, *script.calls(loop)))
        if not evaluates or script.calls(loop, "backward"):
            continue
        for call in script.calls(script.scope(loop)):
            if script.before(loop, call) and _MEASURES.fullmatch(collective(script, call)):
                yield call
                break
