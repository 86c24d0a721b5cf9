"""rank-conditional-collective: some ranks call what all must call; they wait for the others for ever."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.collective import collective
from lockstep.lint.conditions import Test, conditions
from lockstep.lint.rank_test import Side, side
from lockstep.lint.source import Function, Problem, Scope, Source, calls, dotted, keyword, last_name, local
from lockstep.lint.wrapped import wrapper

NAME = "rank-conditional-collective"
_EVALUATES = re.compile(r"^(run_|do_)?(evaluate|evaluation|validate|validation|eval|test|infer|predict)(_|$)", re.I)


@dataclass(frozen=True, slots=True)
class _Part:
    """A call in which all ranks take part, made by the ranks of one side only."""

    call: ast.Call
    what: str
    key: str
    side: Side


def check(source: Source) -> Iterator[Problem]:
    scopes: list[Scope] = [source.tree, *(node for node in source.nodes if isinstance(node, Function))]
    for scope in scopes:
        parts = list(_parts(source, scope))
        for part in parts:
            if any(each.key == part.key and each.side != part.side for each in parts) or _elsewhere(source, scope, part):
                continue
            ranks = f"rank {part.side.number}" if part.side.inside else f"the ranks other than {part.side.number}"
            message = (
                f"only {ranks} would reach {part.what}, in which every rank has to take part: the program hangs or pairs it with another"
            )
            yield Problem(part.call.lineno, NAME, f"{message}; call it on all ranks, and keep only printing and saving under the condition")


def _parts(source: Source, scope: Scope) -> Iterator[_Part]:
    for call in calls(scope):
        if (found := _joint(source, call)) is not None and (ranks := _ranks(source, call)) is not None:
            yield _Part(call, *found, ranks)


def _joint(source: Source, call: ast.Call) -> tuple[str, str] | None:
    """If all ranks have to take part in a call: what it is, in words and as a key that is the same on both sides of a condition."""
    if (what := collective(source, call)) is not None:
        return f"{what}()", what
    if (forward := _forward(source, call)) is not None:
        return f"the forward of {forward}, a DistributedDataParallel that sends its buffers", f"forward {forward}"
    if isinstance(call.func, ast.Name) and (inner := _unconditional(source, call.func.id)) is not None:
        return f"{inner}() in {call.func.id}()", inner
    return None


def _ranks(source: Source, node: ast.AST) -> Side | None:
    """The ranks that reach `node`: by the conditions around it, the outermost that depends on the rank, or by a return before it."""
    found = [each for test in conditions(source, node) if (each := side(source, test)) is not None]
    unknown = any("rank" in ast.unparse(test.expression).lower() and side(source, test) is None for test in conditions(source, node))
    if found:
        return None if unknown else found[-1]
    return None if unknown else _after_return(source, node)


def _after_return(source: Source, node: ast.AST) -> Side | None:
    """`if rank != 0: return` above: what follows in the function runs on the other side."""
    below = node
    for above in source.ancestors(node):
        for body in (getattr(above, "body", None), getattr(above, "orelse", None)):
            if not isinstance(body, list) or not any(below is statement for statement in body):
                continue
            for statement in body[: next(place for place, each in enumerate(body) if each is below)]:
                leaves = (
                    isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], (ast.Return, ast.Continue))
                )
                if leaves and isinstance(statement, ast.If) and (found := side(source, Test(statement.test, False))) is not None:
                    return found if not any(calls_unseen(source, each) for each in statement.body) else None
        below = above
    return None


def _elsewhere(source: Source, scope: Scope, part: _Part) -> bool:
    """May the other ranks make the same call out of sight: in a function of this file, or in one that is imported?"""
    for node in local(scope):
        if not isinstance(node, ast.If) or (found := side(source, Test(node.test, True))) is None:
            continue
        others = node.orelse if found.inside == part.side.inside else node.body
        for call in (call for statement in others for call in calls(statement)):
            if part.key in _contains(source, last_name(call), set()):
                return True
        if source.inside(part.call, node) and any(calls_unseen(source, statement) for statement in others):
            return True
    return False


def calls_unseen(source: Source, statement: ast.AST) -> bool:
    """Does it call a function whose code is neither in this file nor known to be without collectives? Methods of other objects are."""
    for call in calls(statement):
        name = dotted(call.func) or ""
        ours = source.named(last_name(call)) or hasattr(builtins, name)
        may_be = isinstance(call.func, ast.Name) or source.is_imported(call.func) or name.startswith("self.")
        home = (source.full_name(call.func) or "").split(".")[0]
        if may_be and not ours and home not in sys.stdlib_module_names and home not in {"torch", "numpy"}:
            return True
    return False


def _contains(source: Source, name: str, seen: set[str]) -> set[str]:
    """The keys of all collectives in this file's functions and methods of that name, also through others that they call."""
    found: set[str] = set()
    if name in seen:
        return found
    seen.add(name)
    for call in (call for function in source.named(name) for call in calls(function)):
        found |= {what} if (what := collective(source, call)) else set()
        found |= _contains(source, last_name(call), seen)
    return found


def _unconditional(source: Source, name: str) -> str | None:
    """A collective that a function of this file makes whenever it is called, at its top level or in loops and with blocks."""
    function = source.functions.get(name)
    if (
        function is None
        or function.decorator_list
        or function.args.defaults
        or any(isinstance(node, (ast.Return, ast.Yield, ast.Raise)) for node in _early(function))
    ):
        return None
    for call in calls(function):
        guarded = any(isinstance(above, (ast.If, ast.IfExp, ast.Try, ast.BoolOp)) for above in source.ancestors(call))
        if not guarded and (what := collective(source, call)) is not None:
            return what
    return None


def _early(function: Function) -> Iterator[ast.AST]:
    """All nodes but the last statement: a return among them may come before the collective."""
    for statement in function.body[:-1]:
        yield statement
        yield from local(statement)


def _forward(source: Source, call: ast.Call) -> str | None:
    """The name of the wrapper if its forward runs here: by `ddp(x)`, or by `evaluate(ddp, ...)`."""
    if (made := wrapper(source, call.func, call)) is not None:
        return dotted(call.func) if _sends_buffers(made) else None
    if not _EVALUATES.match(last_name(call)):
        return None
    for place, given in enumerate(call.args):
        made = wrapper(source, given, call)
        if made is not None and _sends_buffers(made) and _calls_it(source, call, place):
            return dotted(given)
    return None


def _sends_buffers(made: ast.Call) -> bool:
    given = keyword(made, "forward_sync_buffers") or keyword(made, "broadcast_buffers")
    return given is None or (isinstance(given, ast.Constant) and given.value is True)


def _calls_it(source: Source, call: ast.Call, place: int) -> bool:
    """If the function is in this file: does it call the model that it is given, rather than the model's .module?"""
    function = source.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if function is None:
        return True
    named = [*function.args.posonlyargs, *function.args.args]
    return place < len(named) and any(dotted(inner.func) == named[place].arg for inner in calls(function))
