"""A rule for calls that all ranks must make but only some make: these wait forever."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.lint.conditions import Side, Test, conditions, side
from lockstep.tools.lint.script import (
    Problem,
    Script,
    argument,
    collective,
    dotted,
    last_name,
    parameter,
    wrapper,
)

_EVALUATES = re.compile(
    r"(run_|do_)?(evaluate|evaluation|validate|validation|eval|test|infer|predict)(_.*)?",
    re.IGNORECASE,
)
_KNOWN = sys.stdlib_module_names | {"torch", "numpy"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A call that all ranks must make, and the ranks that make it (`side`). The same call by the
    other ranks has the same `key`.
    """

    call: cst.Call
    description: str
    key: str
    side: Side
    scope: cst.CSTNode


def rank_conditional_collective(script: Script) -> Iterator[Problem]:
    parts = list(_parts(script))
    for part in parts:
        same = [other for other in parts if other.key == part.key and other.scope is part.scope]
        if any(other.side != part.side for other in same) or _elsewhere(script, part):
            continue
        ranks = f"the ranks other than {part.side.number}"
        if part.side.inside:
            ranks = f"rank {part.side.number}"
        yield Problem(part.call, {"ranks": ranks, "what": part.description})


def _parts(script: Script) -> Iterator[_Part]:
    for call in script.all(cst.Call):
        scope = script.frames[call]
        joint = None if isinstance(scope, cst.Lambda) else _joint(script, call)
        if joint is None:
            continue
        ranks = _ranks(script, call)
        if ranks is not None:
            yield _Part(call, *joint, ranks, scope)


def _joint(script: Script, call: cst.Call) -> tuple[str, str] | None:
    """Return a description and a key of a call that all ranks must make; None for other calls."""
    direct = collective(script, call)
    if direct:
        return f"{direct}()", direct
    wrapped = _forward(script, call)
    if wrapped:
        forward = f"the forward of {wrapped}, a DistributedDataParallel that sends its buffers"
        return forward, f"forward {wrapped}"
    inner = _unconditional(script, call)
    if inner:
        return f"{inner}() in {last_name(call)}()", inner
    return None


def _ranks(script: Script, node: cst.CSTNode) -> Side | None:
    """Return the ranks that reach `node`, by the outermost condition around it that depends on
    the rank, or by a return before it.
    """
    outermost: Side | None = None
    for test in conditions(script, node):
        ranks = side(script, test)
        if ranks is None and "rank" in script.text(test.expression).lower():
            return None
        outermost = ranks or outermost
    return outermost or _after_return(script, node)


def _after_return(script: Script, node: cst.CSTNode) -> Side | None:
    """Return the ranks that are left after `if rank != 0: return` (or continue) above `node`."""
    around = [above for above, _ in script.ancestors(node)]
    for statement in script.within(script.frames[node], cst.If):
        if statement in around or script.parents[statement] not in around or statement.orelse:
            continue
        code = script.module.code_for_node(statement.body).rstrip()
        leaves = re.search(r"\b(return|continue)\b[^;\n]*$", code)
        if not leaves or not script.before(statement, node):
            continue
        ranks = side(script, Test(statement.test, False))
        if ranks is not None:
            return None if _calls_unseen(script, statement.body) else ranks
    return None


def _elsewhere(script: Script, part: _Part) -> bool:
    """Whether the other ranks may make the same call inside a function, of this file or
    imported.
    """
    for node in script.within(part.scope, cst.If):
        ranks = side(script, Test(node.test, True))
        others = node.orelse if ranks and ranks.inside == part.side.inside else node.body
        if ranks is None or others is None:
            continue
        if any(part.key in _contains(script, call, set()) for call in script.calls(others)):
            return True
        if script.inside(part.call, node) and _calls_unseen(script, others):
            return True
    return False


def _calls_unseen(script: Script, root: cst.CSTNode) -> bool:
    """Whether `root` calls a function that is neither in this file nor known to be without
    collectives. Methods of other objects count as known.
    """
    for call in script.calls(root):
        name = dotted(call.func)
        first = name.split(".")[0]
        is_method = "." in name and first not in script.imports and first != "self"
        if not name or is_method or hasattr(builtins, name):
            continue
        if script.functions(last_name(call)):
            continue
        if script.name(call.func).split(".")[0] not in _KNOWN:
            return True
    return False


def _contains(script: Script, call: cst.Call, seen: set[str]) -> set[str]:
    """Return all collectives in this file's functions and methods of the called name, and in the
    functions that they call.
    """
    names: set[str] = set()
    name = last_name(call)
    if name in seen:
        return names
    seen.add(name)
    for function in script.functions(name):
        for inner in script.calls(function):
            names |= {collective(script, inner), *_contains(script, inner, seen)}
    return names


def _unconditional(script: Script, call: cst.Call) -> str:
    """Return a collective that the called function of this file always makes: at its top level,
    or in loops and with blocks.
    """
    function = script.called(call)
    if function is None or function.decorators:
        return ""
    if any(parameter.default for parameter in function.params.params):
        return ""
    last = function.body.body[-1]
    ends = script.within(function, cst.Return, cst.Yield, cst.Raise)
    if any(not script.inside(end, last) for end in ends):
        return ""
    guards = (cst.If, cst.IfExp, cst.Try, cst.BooleanOperation)
    for inner in script.calls(function):
        name = collective(script, inner)
        if name and not any(isinstance(above, guards) for above, _ in script.ancestors(inner)):
            return name
    return ""


def _forward(script: Script, call: cst.Call) -> str:
    """Return the name of the wrapper whose forward a call runs: `ddp(x)`, `evaluate(ddp, ...)`."""
    wrapping = wrapper(script, call.func, call)
    if wrapping is not None:
        return dotted(call.func) if _sends_buffers(script, wrapping) else ""
    if not _EVALUATES.fullmatch(last_name(call)):
        return ""
    function = script.called(call)
    for position, arg in enumerate(call.args):
        wrapping = wrapper(script, arg.value, call)
        if function is not None and not script.calls(function, parameter(function, position)):
            continue  # the function calls the model's .module, or no model
        if wrapping is not None and _sends_buffers(script, wrapping):
            return dotted(arg.value)
    return ""


def _sends_buffers(script: Script, wrapping: cst.Call) -> bool:
    sync = argument(wrapping, "forward_sync_buffers") or argument(wrapping, "broadcast_buffers")
    return script.text(sync) in ("", "True")
