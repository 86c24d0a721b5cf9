"""forgotten-set-epoch: a shuffling DistributedSampler that is never told the epoch repeats the first epoch's order for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.modulo import number
from lockstep.lint.source import Function, Loop, Problem, Source, calls, dotted, keyword, last_name, local
from lockstep.lint.wrapped import is_torch_class

NAME = "forgotten-set-epoch"
_HARMLESS = {
    "len",
    "enumerate",
    "zip",
    "iter",
    "islice",
    "tqdm",
    "print",
    "DataLoader",
    "BatchSampler",
    "range",
    "isinstance",
    "min",
    "max",
}


@dataclass(frozen=True, slots=True)
class _Sampler:
    call: ast.Call
    name: str | None  # None if it is made inside the loader's own call
    loader: str
    made: ast.AST


def check(source: Source) -> Iterator[Problem]:
    samplers = list(_samplers(source))
    for sampler in samplers:
        others = {name for each in samplers if each is not sampler for name in (each.name, f"{each.loader}.sampler") if name}
        if _may_be_told(source, sampler, others) or not any(_epochs(source, sampler)):
            continue
        told = sampler.name or f"{sampler.loader}.sampler"
        message = "set_epoch is never called on this shuffling sampler: every epoch repeats the order of the first"
        yield Problem(sampler.call.lineno, NAME, f"{message}; call {told}.set_epoch(epoch) at the beginning of each epoch")


def _samplers(source: Source) -> Iterator[_Sampler]:
    """Those that shuffle for sure, with the loader made of each."""
    for call in source.nodes:
        if not isinstance(call, ast.Call) or last_name(call) != "DataLoader" or (loader := _bound_to(source, call)) is None:
            continue
        given = keyword(call, "sampler") or keyword(call, "batch_sampler")
        if isinstance(given, ast.Call) and last_name(given) == "BatchSampler":
            given = keyword(given, "sampler") or (given.args[0] if given.args else None)
        name = dotted(given)
        made = [given] if name is None else [each.value for each in source.lookup(name, call)]
        values = [value.body if isinstance(value, ast.IfExp) and not isinstance(value.body, ast.Constant) else value for value in made]
        found = [value for value in values if isinstance(value, ast.Call) and _is_shuffling(source, value)]
        if len(found) == 1 and all(value in found or value is None or isinstance(value, ast.Constant) for value in values):
            yield _Sampler(found[0], name, loader, call)


def _bound_to(source: Source, call: ast.Call) -> str | None:
    """The name that a loader has, if it has no other value anywhere (a wrapper such as accelerate's may call set_epoch itself)."""
    statement = source.parents[call]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or (name := dotted(statement.targets[0])) is None:
        return None
    return name if len(source.lookup(name, call)) == 1 else None


def _is_shuffling(source: Source, call: ast.Call) -> bool:
    lockstep = (source.full_name(call.func) or "").startswith("lockstep.")
    if last_name(call) != "DistributedSampler" or not (lockstep or is_torch_class(source, call.func, {"DistributedSampler"})):
        return False
    shuffle = keyword(call, "shuffle") or (call.args[3] if len(call.args) > 3 else None)
    return shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)


def _may_be_told(source: Source, sampler: _Sampler, others: set[str]) -> bool:
    """Is there a set_epoch that is not for sure another sampler's, or `.epoch = ...`, which is the same?"""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "set_epoch" and dotted(node.value) not in others:
            return True
        if isinstance(node, ast.Attribute) and node.attr == "epoch" and isinstance(node.ctx, ast.Store):
            told = dotted(node.value)
            if told == sampler.name or (told or "").endswith(".sampler"):
                return True
    return False


def _epochs(source: Source, sampler: _Sampler) -> Iterator[Loop]:
    """Loops that train on the loader again and again."""
    for loop in source.nodes:
        if (
            not isinstance(loop, Loop)
            or source.inside(sampler.made, loop)
            or source.lookup(sampler.loader, loop) != source.lookup(sampler.loader, sampler.made)
        ):
            continue
        if (
            isinstance(loop, ast.For)
            and isinstance(loop.iter, ast.Call)
            and last_name(loop.iter) == "range"
            and number(loop.iter.args[-1]) == 1
        ):
            continue
        passed = list(_handed_over(loop, {sampler.loader, sampler.name}))
        if any(_trained(source, call, sampler.loader) is None for call in passed):
            continue  # handed to code that cannot be seen here: it may call set_epoch
        walked = any(walk is not loop and _trains_on(walk, sampler.loader) for walk in ast.walk(loop))
        if walked or any(_trained(source, call, sampler.loader) for call in passed):
            yield loop


def _handed_over(loop: Loop, names: set[str | None]) -> Iterator[ast.Call]:
    """Calls in the loop that get the loader or the sampler, other than those which only walk it."""
    for call in calls(loop):
        given = [*call.args, *(each.value for each in call.keywords)]
        if last_name(call) not in _HARMLESS and any(dotted(each) is not None and dotted(each) in names for each in given):
            yield call


def _trained(source: Source, call: ast.Call, loader: str) -> bool | None:
    """Does this file's function train on the loader that it is given? None if the function is not to be seen."""
    function = source.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if function is None:
        return None
    parameter = _parameter(function, call, loader)
    if parameter is None:
        return None
    return any(_trains_on(loop, parameter) for loop in ast.walk(function))


def _parameter(function: Function, call: ast.Call, loader: str) -> str | None:
    named = [*function.args.posonlyargs, *function.args.args]
    for place, given in enumerate(call.args):
        if dotted(given) == loader and place < len(named):
            return named[place].arg
    return next((each.arg for each in call.keywords if dotted(each.value) == loader), None)


def _trains_on(loop: ast.AST, loader: str) -> bool:
    if not isinstance(loop, (ast.For, ast.AsyncFor)) or not any(dotted(node) == loader for node in ast.walk(loop.iter)):
        return False
    return any(isinstance(node, ast.Call) and last_name(node) == "backward" for node in local(loop))
