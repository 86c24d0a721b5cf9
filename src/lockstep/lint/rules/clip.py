"""clip-inside-no-sync: clipping a gradient that is not complete yet; each rank's part is cut by another norm."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.conditions import conditions
from lockstep.lint.source import Problem, Source, calls, dotted, keyword, last_name

NAME = "clip-inside-no-sync"
_CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_gradients", "clip_grads_with_norm_", "clip_grad_norm", "clip_grad_value"}
_BLOCKS = {"no_sync", "no_backward_sync"}
_BY_HAND = re.compile(r"reduce|average|sync_grad", re.I)


def check(source: Source) -> Iterator[Problem]:
    for call in source.nodes:
        if not isinstance(call, ast.Call) or last_name(call) not in _CLIPS:
            continue
        if _inside_no_sync(source, call):
            message = f"{last_name(call)} inside no_sync() clips this rank's unfinished gradient by its own norm, before it is summed"
            yield Problem(call.lineno, NAME, f"{message}; clip once, after the window's last backward and before step()")
        elif (line := _reduced_later(source, call)) is not None:
            message = f"{last_name(call)} before the gradients are reduced (line {line}) clips each rank's part by another norm"
            yield Problem(call.lineno, NAME, f"{message}; reduce first, then clip once, before step()")


def _inside_no_sync(source: Source, call: ast.Call) -> bool:
    for block in source.ancestors(call):
        if not isinstance(block, (ast.With, ast.AsyncWith)):
            continue
        held = [item.context_expr for item in block.items if _holds_back(source, item.context_expr)]
        if not held or any(_BY_HAND.search(last_name(other)) for other in calls(block) if other.lineno < call.lineno):
            continue
        inner = [test for test in conditions(source, call) if source.inside(test.expression, block)]
        if not inner or all(_always(expression) for expression in held):
            return True
    return False


def _holds_back(source: Source, expression: ast.expr) -> bool:
    """`model.no_sync()`, also as one branch of a conditional, or a name that is bound to such a thing."""
    if any(isinstance(node, ast.Attribute) and node.attr in _BLOCKS and not _off(source, node) for node in ast.walk(expression)):
        return True
    named = expression.func if isinstance(expression, ast.Call) else expression
    if not isinstance(named, ast.Name):
        return False
    found = [each.value for each in source.lookup(named.id, named) if each.value is not None]
    return any(isinstance(node, ast.Attribute) and node.attr in _BLOCKS for value in found for node in ast.walk(value))


def _off(source: Source, node: ast.AST) -> bool:
    call = source.parents[node]
    enabled = keyword(call, "enabled") if isinstance(call, ast.Call) else None
    return isinstance(enabled, ast.Constant) and not enabled.value


def _always(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and last_name(expression) == "no_sync"


def _reduced_later(source: Source, clip: ast.Call) -> int | None:
    """The line of a reduction by hand that follows in the same turn of the loop, after a backward."""
    loops = source.loops(clip)
    if not loops or not any(last_name(call) == "backward" and call.lineno < clip.lineno for call in calls(loops[0])):
        return None
    choices = {id(test.expression): test.value for test in conditions(source, clip)}
    for call in calls(loops[0]):
        apart = any(choices.get(id(test.expression), test.value) != test.value for test in conditions(source, call))
        if call.lineno > clip.lineno and not apart and _reduces_gradients(source, call):
            return call.lineno
    return None


def _reduces_gradients(source: Source, call: ast.Call) -> bool:
    """`all_reduce(p.grad)`, or a function of this file that does it."""
    name = source.full_name(call.func) or ""
    if last_name(call) == "all_reduce" and name.startswith(("torch.distributed", "lockstep.collectives")):
        return bool(call.args) and any(part.endswith((".grad", ".grad.data")) for part in (dotted(call.args[0]) or "",))
    function = source.functions.get(call.func.id) if isinstance(call.func, ast.Name) else None
    return function is not None and any(
        _reduces_gradients(source, inner) for inner in calls(function) if inner.func is not call.func and last_name(inner) == "all_reduce"
    )
