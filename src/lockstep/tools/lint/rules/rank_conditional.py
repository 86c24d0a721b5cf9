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
    what: str
    key: str
    side: Side
    scope: cst.CSTNode


def rank_conditional_collective(script: Script) -> Iterator[Problem]:
    parts = list(_parts(script))
    for part in parts:
        same = [each for each in parts if each.key == part.key and each.scope is part.scope]
        if any(each.side != part.side for each in same) or _elsewhere(script, part):
            continue
        number = part.side.number
        ranks = f"rank {number}" if part.side.inside else f"the ranks other than {number}"
        yield Problem(part.call, {"ranks": ranks, "what": part.what})


def _parts(script: Script) -> Iterator[_Part]:
    for call in script.all(cst.Call):
        scope = script.frames[call]
        if isinstance(scope, cst.Lambda) or not (joint := _joint(script, call)):
            continue
        if (found := _ranks(script, call)) is not None:
            yield _Part(call, *joint, found, scope)


def _joint(script: Script, call: cst.Call) -> tuple[str, str] | None:
    """Return a description and a key of a call that all ranks must make; None for other calls."""
    if what := collective(script, call):
        return f"{what}()", what
    if name := _forward(script, call):
        forward = f"the forward of {name}, a DistributedDataParallel that sends its buffers"
        return forward, f"forward {name}"
    if inner := _unconditional(script, call):
        return f"{inner}() in {last_name(call)}()", inner
    return None


def _ranks(script: Script, node: cst.CSTNode) -> Side | None:
    """Return the ranks that reach `node`, by the outermost condition around it that depends on
    the rank, or by a return before it.
    """
    known: Side | None = None
    for test in conditions(script, node):
        found = side(script, test)
        if found is None and "rank" in script.text(test.expression).lower():
            return None
        known = found or known
    return known or _after_return(script, node)


def _after_return(script: Script, node: cst.CSTNode) -> Side | None:
    """Return the ranks that are left after `if rank != 0: return` (or continue) above `node`."""
    around = [above for above, _ in script.ancestors(node)]
    for statement in script.within(script.frames[node], cst.If):
        if statement in around or script.parents[statement] not in around or statement.orelse:
            continue
        code = script.module.code_for_node(statement.body).rstrip()
        leaves = re.search(r"\b(return|continue)\b[^;\n]*$", code) and script.before(
            statement, node
        )
        if leaves and (found := side(script, Test(statement.test, False))) is not None:
            return None if _calls_unseen(script, statement.body) else found
    return None


def _elsewhere(script: Script, part: _Part) -> bool:
    """Whether the other ranks may make the same call inside a function, of this file or
    imported.
    """
    for node in script.within(part.scope, cst.If):
        found = side(script, Test(node.test, True))
        others = node.orelse if found and found.inside == part.side.inside else node.body
        if found is None or others is None:
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
        imported = name.split(".")[0] in script.imports
        may_be = "." not in name or imported or name.startswith("self.")
        ours = not name or hasattr(builtins, name) or script.functions(last_name(call))
        if may_be and not ours and script.name(call.func).split(".")[0] not in _KNOWN:
            return True
    return False


def _contains(script: Script, call: cst.Call, seen: set[str]) -> set[str]:
    """Return all collectives in this file's functions and methods of the called name, and in the
    functions that they call.
    """
    found: set[str] = set()
    name = last_name(call)
    if name not in seen:
        seen.add(name)
        calls = [inner for function in script.functions(name) for inner in script.calls(function)]
        for inner in calls:
            found |= {collective(script, inner), *_contains(script, inner, seen)}
    return found


def _unconditional(script: Script, call: cst.Call) -> str:
    """Return a collective that the called function of this file always makes: at its top level,
    or in loops and with blocks.
    """
    function = script.called(call)
    if function is None or function.decorators:
        return ""
    if any(each.default for each in function.params.params):
        return ""
    ends = script.within(function, cst.Return, cst.Yield, cst.Raise)
    if any(not script.inside(each, function.body.body[-1]) for each in ends):
        return ""
    for inner in script.calls(function):
        guards = (cst.If, cst.IfExp, cst.Try, cst.BooleanOperation)
        guarded = any(isinstance(above, guards) for above, _ in script.ancestors(inner))
        if not guarded and (what := collective(script, inner)):
            return what
    return ""


def _forward(script: Script, call: cst.Call) -> str:
    """Return the name of the wrapper whose forward a call runs: `ddp(x)`, `evaluate(ddp, ...)`."""
    if (made := wrapper(script, call.func, call)) is not None:
        return dotted(call.func) if _sends_buffers(script, made) else ""
    function = script.called(call)
    for place, arg in enumerate(call.args) if _EVALUATES.fullmatch(last_name(call)) else ():
        made = wrapper(script, arg.value, call)
        if function is not None and not script.calls(function, parameter(function, place)):
            continue  # the function calls the model's .module, or no model
        if made is not None and _sends_buffers(script, made):
            return dotted(arg.value)
    return ""


def _sends_buffers(script: Script, made: cst.Call) -> bool:
    given = argument(made, "forward_sync_buffers") or argument(made, "broadcast_buffers")
    return script.text(given) in ("", "True")
