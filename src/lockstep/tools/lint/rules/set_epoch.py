"""A shuffling DistributedSampler that is never told the epoch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.lint.distributed import is_torch_class
from lockstep.tools.lint.script import Loop, Problem, Script, argument, dotted, last_name, parameter

_ONLY_WALKS = re.compile(
    r"len|enumerate|zip|iter|islice|tqdm|print|DataLoader|BatchSampler|range|isinstance|min|max"
)


@dataclass(frozen=True, slots=True)
class Sampler:
    """A DistributedSampler and its loader. `name` is "" for one that is made inside the loader's
    own call.
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
            told = f"{sampler.name or sampler.loader + '.sampler'}.set_epoch(epoch)"
            wrong = "set_epoch is never called on this shuffling sampler"
            harm = "every epoch repeats the order of the first"
            advice = f"call {told} at the beginning of each epoch"
            yield Problem(sampler.call, f"{wrong}: {harm}", advice)


def distributed_samplers(script: Script) -> Iterator[Sampler]:
    """Of the loaders that have no other value anywhere: a wrapper of accelerate's may call
    set_epoch itself.
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
    """Is there a set_epoch that is not for sure another sampler's, or `.epoch = ...`, which is
    the same?
    """
    methods = [node for node in script.all(cst.Attribute) if last_name(node) == "set_epoch"]
    written = [dotted(node.target) for node in script.all(cst.AssignTarget)]
    by_hand = re.compile(rf"{sampler.name}\.epoch|.*\.sampler\.epoch")
    told = {dotted(node.value) for node in methods}
    return not told <= others or any(by_hand.fullmatch(each) for each in written)


def _is_epochs(script: Script, loop: Loop, sampler: Sampler) -> bool:
    """Does the loop train on the loader again and again, and hand it to no code that cannot be
    seen here?
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
    """Is there a loop over the loader with a backward in it?"""
    loops = [loop for loop in script.within(root, cst.For) if loader in script.names(loop.iter)]
    return any(script.calls(loop, "backward") for loop in loops)
