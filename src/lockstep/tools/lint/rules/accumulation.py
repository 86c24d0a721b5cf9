"""Rules for gradient accumulation where a test such as `i % N` decides which backward communicates
or which micro-batch steps. The test selects the wrong micro-batch, or misses the last window.

S: gradients are exchanged. In the second line, a short last window is never exchanged.
no_sync() if i % 4 != 0:         0 S  1 .  2 .  3 .  |  4 S  5 .  6 .  7 .  |  8 S  9 .
no_sync() if (i + 1) % 4 != 0:   0 .  1 .  2 .  3 S  |  4 .  5 .  6 .  7 S  |  8 .  9 .
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lockstep.tools.lint import conditions as on
from lockstep.tools.lint.conditions import Modulo, Test
from lockstep.tools.lint.script import Loop, Problem, Script, argument, last_name

BLOCKS = ("no_sync", "no_backward_sync")
_FLAG = "require_backward_grad_sync"
_LAST = re.compile(r"last|final|\bend|_end|len\(|boundary|remain", re.IGNORECASE)
_ENDLESS = re.compile(r"cycle|infinite|forever|repeat|islice|count|endless|\*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Decision:
    """A node where a remainder decides, with the other tests there. `start` is the counter in the
    first iteration, if known.
    """

    node: ast.expr | ast.stmt
    modulo: Modulo
    others: list[Test]
    loop: Loop | None
    start: int | None

    @property
    def position(self) -> int | None:
        """The micro-batch in the window, if known: 0 is the first, -1 the last."""
        return None if self.start is None else self.modulo.residue - self.start

    @property
    def right(self) -> dict[str, str]:
        """The window's size and the correct test, for the rule's message."""
        size = self.modulo.size
        shift = 1 - (self.start or 0)
        counter = self.modulo.counter
        if shift > 0:
            counter = f"({counter} + {shift})"
        end = f"when {counter} % {size} == 0 or it is the loader's last batch"
        return {"size": size, "end": end}


def no_sync_modulo(script: Script) -> Iterator[Problem]:
    for window in _held_back(script):
        wrong = _wrong_position(script, window)
        if wrong:
            yield Problem(window.node, window.right | {"wrong": wrong})


def no_sync_tail(script: Script) -> Iterator[Problem]:
    for window in _held_back(script):
        if not _wrong_position(script, window) and _loses_its_tail(script, window):
            yield Problem(window.node, window.right)


def accumulation_tail(script: Script) -> Iterator[Problem]:
    for window in _steps(script, script.all(ast.Call)):
        if window.loop is None or not _loses_its_tail(script, window):
            continue
        attributes = {last_name(node) for node in script.within(window.loop, ast.Attribute)}
        if script.calls(window.loop, "backward") and not attributes & {*BLOCKS, _FLAG}:
            yield Problem(window.node, window.right)


def _held_back(script: Script) -> Iterator[_Decision]:
    """Yield each block or flag that skips the exchange of gradients because of a remainder."""
    for node in script.all(ast.Attribute):
        if node.attr not in BLOCKS:
            continue
        tests = [Test(test.expression, not test.value) for test in on.conditions(script, node)]
        call = script.parents[node]
        if node.attr == "no_backward_sync" and isinstance(call, ast.Call):
            enabled = argument(call, "enabled", 1)
            if enabled is not None:
                tests.append(Test(enabled, False))
        yield from _window(script, node, tests)
    for flag in script.all(ast.Assign):
        if last_name(flag.targets[0]) == _FLAG:
            yield from _window(script, flag, [Test(flag.value, True)])


def _steps(script: Script, calls: Iterable[ast.Call]) -> Iterator[_Decision]:
    """Yield each `optimizer.step()` or `scaler.step(optimizer)` under a test of a remainder."""
    for call in calls:
        if re.search(r"(opt|scaler)[^.]*\.step$", script.text(call.func), re.IGNORECASE):
            yield from _window(script, call, on.conditions(script, call))


def _window(
    script: Script, node: ast.expr | ast.stmt, tests: Iterable[Test]
) -> Iterator[_Decision]:
    remainders: dict[Test, Modulo] = {}
    others: list[Test] = []
    for test in tests:
        for part in on.split(script, test, ast.Or):
            remainder = on.modulo(script, part)
            if remainder is None:
                others.append(part)
            else:
                remainders[part] = remainder
    modulos = list(remainders.values())
    if len(modulos) != 1 or modulos[0].size == "1":
        return
    counter = modulos[0].counter
    loop = on.counting_loop(script, counter, node)
    start = None if loop is None else on.first_value(script, counter, loop, node)
    for other in others:
        detects_last = _LAST.search(script.text(other.expression))
        if not detects_last and not on.is_constant(script, other.expression, loop):
            return
    yield _Decision(node, modulos[0], others, loop, start)


def _wrong_position(script: Script, window: _Decision) -> str:
    size = window.modulo.size
    equal = window.modulo.equal
    if equal and window.position == 0:
        return (
            f"gradients are exchanged on the first micro-batch of each window of {size}, not on the"
            " last: the others' stay on their rank"
        )
    if not equal and window.position == -1:
        return (
            f"no_sync() holds on the last micro-batch of each window of {size}, the one that must"
            " communicate"
        )
    if equal and _stepped_elsewhere(script, window):
        return (
            "gradients are exchanged on another micro-batch than the one before optimizer.step():"
            " the replicas drift apart"
        )
    return ""


def _stepped_elsewhere(script: Script, window: _Decision) -> bool:
    """Whether an optimizer step later in the same iteration depends on another residue of the
    same counter.
    """
    modulo = window.modulo
    changes = [binding.node for binding in script.lookup(modulo.counter, window.node)]
    calls = script.calls(window.loop or script.scope(window.node), "step")
    for step in _steps(script, calls):
        same_counter = replace(step.modulo, residue=modulo.residue) == modulo
        if not same_counter or step.modulo == modulo or script.before(step.node, window.node):
            continue
        if not any(_is_between(script, window.node, change, step.node) for change in changes):
            return True
    return False


def _is_between(script: Script, first: ast.AST, node: ast.AST, last: ast.AST) -> bool:
    return script.before(first, node) and script.before(node, last)


def _loses_its_tail(script: Script, window: _Decision) -> bool:
    """Whether the last, short window is lost. False if the number of iterations may be a multiple
    of N by construction, or if the loop may end early.
    """
    loop = window.loop
    modulo = window.modulo
    counted = on.counted_call(loop) if loop is not None else None
    if loop is None or counted is None or not modulo.equal or window.position != -1:
        return False
    if any(script.within(loop, ast.Break)) or any(script.within(loop, ast.Return)):
        return False
    if not all(on.is_constant(script, other.expression, loop) for other in window.others):
        return False
    arguments = [argument for argument in counted.args if not isinstance(argument, ast.Constant)]
    texts = [script.text(argument) for argument in arguments]
    texts += [script.text(script.definition(argument)) for argument in arguments]
    for text in texts:
        if _ENDLESS.search(text) or _mentions(text, modulo.size):
            return False
    operations = script.within(script.scope(loop), ast.BinOp)
    return not any(_divides(script, operation, modulo) for operation in operations)


def _divides(script: Script, node: ast.BinOp, modulo: Modulo) -> bool:
    """Whether the script computes `len(loader) % N` or `n // N * N`, and so may handle the tail."""
    left = script.text(node.left)
    right = script.text(node.right)
    if isinstance(node.op, ast.Mult):
        return "//" in left or "//" in right
    divided = isinstance(node.op, ast.Mod) and right == modulo.size
    return divided and not _mentions(left, modulo.counter)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", text) is not None
