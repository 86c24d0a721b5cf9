"""no-sync-modulo and no-sync-tail: a modulo decides which backward communicates, and picks the wrong one, or forgets the last.

i % 4 != 0         0 S   1 .   2 .   3 .  |  4 S   5 .   6 .   7 .  |  8 S   9 .      S: gradients are exchanged
(i + 1) % 4 != 0   0 .   1 .   2 .   3 S  |  4 .   5 .   6 .   7 S  |  8 .   9 .      the short last window never is
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.conditions import Test, any_of, conditions, definition
from lockstep.lint.modulo import Modulo, counted_call, counting_loop, first_value, modulo
from lockstep.lint.source import Loop, Problem, Source, calls, keyword, last_name, local, names_in

MODULO, TAIL = "no-sync-modulo", "no-sync-tail"
_BLOCKS = {"no_sync", "no_backward_sync"}
_LAST = re.compile(r"last|final|\bend|_end|len\(|boundary|remain", re.I)
_HARMLESS = {"isinstance", "hasattr", "getattr", "len", "get_world_size", "is_initialized", "is_available", "bool"}
_ENDLESS = re.compile(r"cycle|infinite|forever|repeat|islice|count|endless", re.I)


def check(source: Source) -> Iterator[Problem]:
    for node in source.nodes:
        tests = list(_synchronises(source, node))
        if not tests:
            continue
        alternatives = [part for test in tests for part in any_of(source, test)]
        found = {id(part): window for part in alternatives if (window := modulo(part)) is not None and "len(" not in window.text}
        if len(found) != 1:
            continue
        others = [part for part in alternatives if id(part) not in found]
        yield from _judge(source, node, next(iter(found.values())), others)


def _synchronises(source: Source, node: ast.AST) -> Iterator[Test]:
    """Tests of which one must hold for the gradients to be exchanged, if `node` is what holds them back."""
    if isinstance(node, ast.Attribute) and node.attr in _BLOCKS:
        call = source.parents[node]
        if node.attr == "no_backward_sync" and isinstance(call, ast.Call) and call.func is node:
            enabled = keyword(call, "enabled") or (call.args[1] if len(call.args) > 1 else None)
            if enabled is not None:
                yield Test(enabled, False)
        for test in conditions(source, node):
            yield Test(test.expression, not test.value)
    elif isinstance(node, ast.Assign) and any(last_name(target) == "require_backward_grad_sync" for target in node.targets):
        yield Test(node.value, True)


def _judge(source: Source, node: ast.AST, window: Modulo, others: list[Test]) -> Iterator[Problem]:
    line, size, counter = getattr(node, "lineno", 0), window.text, window.counter
    loop = counting_loop(source, counter, node)
    constant = [_is_constant(source, test, loop) for test in others]
    says_last = [bool(_LAST.search(ast.unparse(test.expression))) for test in others]
    if window.normal(0) == window.normal(-1) or not all(fixed or last for fixed, last in zip(constant, says_last, strict=True)):
        return  # windows of one; or a test that may mean anything
    start = first_value(source, counter, node)
    place = None if start is None else window.normal(window.residue - start)
    end = _end_of_window(counter, start, size)
    repair = f"exchange, and step, when {end} or it is the loader's last batch"
    stepped = _stepped_elsewhere(source, node, window, loop)
    if window.equal and place == 0:
        message = (
            f"gradients are exchanged on the first micro-batch of each window of {size}, not on the last: the others' stay on their rank"
        )
        yield Problem(line, MODULO, f"{message}; {repair}")
    elif not window.equal and place == -1:
        yield Problem(
            line, MODULO, f"no_sync() holds on the last micro-batch of each window of {size}, the one that must communicate; {repair}"
        )
    elif stepped is not None:
        message = f"gradients are exchanged on another micro-batch than the one before optimizer.step() (line {stepped}): the replicas drift apart"
        yield Problem(line, MODULO, f"{message}; {repair}")
    elif window.equal and place == -1 and all(constant) and loop is not None and _loses_its_tail(source, loop, window):
        message = f"if the number of batches is no multiple of {size}, the short last window is never exchanged"
        yield Problem(line, TAIL, f"{message}; {repair}")


def _end_of_window(counter: str, start: int | None, size: str) -> str:
    shift = 1 - (start or 0)
    return f"({counter} + {shift}) % {size} == 0" if shift > 0 else f"{counter} % {size} == 0"


def _is_constant(source: Source, test: Test, loop: Loop | None) -> bool:
    """Is the test the same in every turn of the loop, so that it can say nothing about the last one?"""
    called = {last_name(node) for node in ast.walk(test.expression) if isinstance(node, ast.Call)}
    if called - _HARMLESS or (_LAST.search(ast.unparse(test.expression)) and "len(" not in ast.unparse(test.expression)):
        return False
    scope = source.scope(test.expression)
    changing = {
        name for name, found in source.bindings(scope).items() if loop is not None and any(source.inside(each.node, loop) for each in found)
    }
    parameters = {
        name for name, found in source.bindings(scope).items() if loop is None and any(isinstance(each.node, ast.arg) for each in found)
    }
    return not names_in(test.expression) & (changing | parameters)


def _stepped_elsewhere(source: Source, node: ast.AST, window: Modulo, loop: Loop | None) -> int | None:
    """The line of an optimizer step after `node`, in the same turn, that another residue of the same counter decides."""
    line = getattr(node, "lineno", 0)
    root = loop or source.scope(node)
    changes = [each.line for each in source.lookup(window.counter, node)]
    for call in calls(root):
        receiver = ast.unparse(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
        if last_name(call) != "step" or not re.search(r"opt|scaler", receiver.rpartition(".")[2]) or call.lineno <= line:
            continue
        tests = [part for test in conditions(source, call) for part in any_of(source, test)]
        found = [step for part in tests if (step := modulo(part)) is not None]
        if len(found) != 1 or any(line <= change <= call.lineno for change in changes):
            continue
        same = found[0].counter == window.counter and found[0].text == window.text and found[0].equal and window.equal
        if same and window.normal(found[0].residue) != window.normal(window.residue):
            return call.lineno
    return None


def _loses_its_tail(source: Source, loop: Loop, window: Modulo) -> bool:
    """Quiet where the number of turns may be a multiple of N by construction, or where the loop may end before its iterable does."""
    if not isinstance(loop, ast.For) or any(isinstance(node, (ast.Break, ast.Return)) for node in local(loop)):
        return False
    counted = counted_call(loop.iter)
    if counted is None or not counted.args:
        return False
    iterated = counted.args[0] if last_name(counted) == "enumerate" else counted
    for expression in (iterated, definition(source, iterated), *(definition(source, each) for each in counted.args)):
        if expression is not None and (names_in(window.divisor) & names_in(expression) or _ENDLESS.search(ast.unparse(expression))):
            return False
        if expression is not None and any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) for node in ast.walk(expression)):
            return False
    return not any(_divides(node, window) for node in local(source.scope(loop)))


def _divides(node: ast.AST, window: Modulo) -> bool:
    """`len(loader) % N` or `n // N * N` somewhere: the script has thought of it."""
    if not isinstance(node, ast.BinOp):
        return False
    if isinstance(node.op, ast.Mult):
        return any(isinstance(side, ast.BinOp) and isinstance(side.op, ast.FloorDiv) for side in (node.left, node.right))
    return isinstance(node.op, ast.Mod) and ast.unparse(node.right) == window.text and window.counter not in names_in(node.left)
