"""A rule for calls that all ranks must make but only some make: these wait forever."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.tools.lint.conditions import RANKS, Test, conditions, reaching
from lockstep.tools.lint.script import (
    Code,
    Problem,
    Script,
    argument,
    arguments,
    dotted,
    last_name,
    parameter,
)
from lockstep.tools.lint.torch_names import collective, wrapper

_EVALUATES = re.compile(
    r"(run_|do_)?(evaluate|evaluation|validate|validation|eval|test|infer|predict)(_.*)?",
    re.IGNORECASE,
)
_KNOWN = sys.stdlib_module_names | {"torch", "numpy"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A call that all ranks must make, and the ranks that may make it. The same call by the other
    ranks has the same `key`.
    """

    call: ast.Call
    description: str
    key: str
    ranks: frozenset[int]
    scope: ast.AST


def rank_conditional_collective(script: Script) -> Iterator[Problem]:
    parts = list(_parts(script))
    for part in parts:
        same = [other for other in parts if other.key == part.key and other.scope is part.scope]
        if all(other.ranks == part.ranks for other in same) and not _elsewhere(script, part):
            yield Problem(part.call, {"ranks": _described(part.ranks), "what": part.description})


def _described(ranks: frozenset[int]) -> str:
    others = RANKS - ranks
    if len(others) < len(ranks):
        return f"the ranks other than {_listed(others)}"
    return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(ranks: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _parts(script: Script) -> Iterator[_Part]:
    for call in script.all(ast.Call):
        scope = script.frames[call]
        joint = None if isinstance(scope, ast.Lambda) else _joint(script, call)
        if joint is None:
            continue
        ranks = _ranks(script, call)
        if ranks and ranks != RANKS:
            yield _Part(call, *joint, ranks, scope)


def _joint(script: Script, call: ast.Call) -> tuple[str, str] | None:
    """Return a description and a key of a call that all ranks must make; None for other calls."""
    direct = collective(script, call)
    if direct:
        is_group = direct.startswith("dist.new_")  # each is a collective of its own
        return f"{direct}()", script.text(call) if is_group else direct
    wrapped = _forward(script, call)
    if wrapped:
        forward = f"the forward of {wrapped}, a DistributedDataParallel that sends its buffers"
        return forward, f"forward {wrapped}"
    inner = _unconditional(script, call)
    if inner:
        return f"{inner}() in {last_name(call)}()", inner
    return None


def _ranks(script: Script, node: ast.Call) -> frozenset[int]:
    """Return the ranks that may reach `node`, by the conditions around it and by each
    `if rank != 0: return` (or continue) above it.
    """
    tests = list(conditions(script, node))
    around = [above for above, _ in script.ancestors(node)]
    for statement in script.within(script.frames[node], ast.If):
        is_above = script.before(statement, node) and script.parents[statement] in around
        leaves = isinstance(statement.body[-1], ast.Return | ast.Continue)
        if not is_above or not leaves or statement in around or statement.orelse:
            continue
        runs_before = all(test in tests for test in conditions(script, statement))
        if runs_before and not _calls_unseen(script, statement.body):
            tests.append(Test(statement.test, False))
    return reaching(script, tests)


def _elsewhere(script: Script, part: _Part) -> bool:
    """Whether the other ranks may make the same call inside a function, of this file or
    imported.
    """
    for node in script.within(part.scope, ast.If):
        for value, branch in ((True, node.body), (False, node.orelse)):
            ranks = reaching(script, [Test(node.test, value)])
            if not ranks or ranks & part.ranks:
                continue
            if any(part.key in _contains(script, call, set()) for call in script.calls(branch)):
                return True
            if script.inside(part.call, node) and _calls_unseen(script, branch):
                return True
    return False


def _calls_unseen(script: Script, root: Code) -> bool:
    """Whether `root` calls a function that is neither in this file nor known to be without
    collectives. Methods of other objects count as known.
    """
    for call in script.calls(root):
        name = dotted(call.func)
        first = name.split(".")[0]
        is_method = "." in name and first not in script.imports and first != "self"
        if not name or is_method or hasattr(builtins, name) or script.functions[last_name(call)]:
            continue
        if script.name(call.func).split(".")[0] not in _KNOWN:
            return True
    return False


def _contains(script: Script, call: ast.Call, seen: set[str]) -> set[str]:
    """Return all collectives in this file's functions and methods of the called name, and in the
    functions that they call.
    """
    names: set[str] = set()
    name = last_name(call)
    if name in seen:
        return names
    seen.add(name)
    for function in script.functions[name]:
        for inner in script.calls(function):
            names |= {collective(script, inner), *_contains(script, inner, seen)}
    return names


def _unconditional(script: Script, call: ast.Call) -> str:
    """Return a collective that the called function of this file always makes: at its top level,
    or in loops and with blocks.
    """
    function = script.called(call)
    if function is None or function.decorator_list or function.args.defaults:
        return ""
    for end in (ast.Return, ast.Yield, ast.Raise):
        for node in script.within(function, end):
            if not script.inside(node, function.body[-1]):
                return ""
    guards = ast.If | ast.IfExp | ast.Try | ast.BoolOp
    for inner in script.calls(function):
        name = collective(script, inner)
        if name and not any(isinstance(above, guards) for above, _ in script.ancestors(inner)):
            return name
    return ""


def _forward(script: Script, call: ast.Call) -> str:
    """Return the name of the wrapper whose forward a call runs: `ddp(x)`, `evaluate(ddp, ...)`."""
    if _sends_buffers(script, call.func, call):
        return dotted(call.func)
    if not _EVALUATES.fullmatch(last_name(call)):
        return ""
    function = script.called(call)
    for key, value in arguments(call).items():
        if function is not None and not script.calls(function, parameter(function, key)):
            continue  # the function calls the model's .module, or no model
        if _sends_buffers(script, value, call):
            return dotted(value)
    return ""


def _sends_buffers(script: Script, node: ast.expr, call: ast.Call) -> bool:
    """Whether a name at `call` is a wrapper whose forward sends the module's buffers."""
    wrapping = wrapper(script, node, call)
    if wrapping is None:
        return False
    sync = argument(wrapping, "forward_sync_buffers") or argument(wrapping, "broadcast_buffers")
    return script.text(sync) in ("", "True")
