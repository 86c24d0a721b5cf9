"""Rules for gradient accumulation where a test such as `i % N` decides which backward communicates
or which micro-batch steps. The test selects the wrong micro-batch, or misses the last window.

S: gradients are exchanged. In the second line, a short last window is never exchanged.
no_sync() if i % 4 != 0:         0 S  1 .  2 .  3 .  |  4 S  5 .  6 .  7 .  |  8 S  9 .
no_sync() if (i + 1) % 4 != 0:   0 .  1 .  2 .  3 S  |  4 .  5 .  6 .  7 S  |  8 .  9 .
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import libcst as cst

from lockstep.tools.lint import conditions as on
from lockstep.tools.lint.conditions import Modulo, Test
from lockstep.tools.lint.script import Loop, Problem, Script, argument, last_name

BLOCKS = ("no_sync", "no_backward_sync")
_FLAG = "require_backward_grad_sync"
_LAST = re.compile(r"last|final|\bend|_end|len\(|boundary|remain", re.IGNORECASE)
_HARMLESS = re.compile(
    r"isinstance|hasattr|getattr|len|get_world_size|is_initialized|is_available|bool"
)
_ENDLESS = re.compile(r"cycle|infinite|forever|repeat|islice|count|endless|\*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Decision:
    """A node where a remainder decides, with the other tests there. `place` is the micro-batch in
    the window, if known: 0 is the first, -1 the last.
    """

    node: cst.CSTNode
    modulo: Modulo
    others: list[Test]
    loop: Loop | None
    start: int | None

    @property
    def place(self) -> int | None:
        return None if self.start is None else self.modulo.residue - self.start

    @property
    def right(self) -> dict[str, str]:
        """The window's size and the correct test, for the rule's message."""
        size, counter, shift = self.modulo.size, self.modulo.counter, 1 - (self.start or 0)
        shifted = f"({counter} + {shift})" if shift > 0 else counter
        return {
            "size": size,
            "end": f"when {shifted} % {size} == 0 or it is the loader's last batch",
        }


def no_sync_modulo(script: Script) -> Iterator[Problem]:
    for window in _held_back(script):
        if wrong := _wrong_place(script, window):
            yield Problem(window.node, window.right | {"wrong": wrong})


def no_sync_tail(script: Script) -> Iterator[Problem]:
    for window in _held_back(script):
        if not _wrong_place(script, window) and _loses_its_tail(script, window):
            yield Problem(window.node, window.right)


def accumulation_tail(script: Script) -> Iterator[Problem]:
    for window in _steps(script, script.all(cst.Call)):
        if window.loop is None or not _loses_its_tail(script, window):
            continue
        held = {last_name(node) for node in script.within(window.loop, cst.Attribute)}
        if script.calls(window.loop, "backward") and not held & {*BLOCKS, _FLAG}:
            yield Problem(window.node, window.right)


def _held_back(script: Script) -> Iterator[_Decision]:
    """Yield each block or flag that skips the exchange of gradients because of a remainder."""
    for node in script.all(cst.Attribute):
        tests = [Test(test.expression, not test.value) for test in on.conditions(script, node)]
        call = script.parents[node]
        if node.attr.value == "no_backward_sync" and isinstance(call, cst.Call):
            enabled = argument(call, "enabled", 1)
            tests += [Test(enabled, False)] if enabled is not None else []
        if node.attr.value in BLOCKS:
            yield from _window(script, node, tests)
    for flag in script.all(cst.Assign):
        if last_name(flag.targets[0].target) == _FLAG:
            yield from _window(script, flag, [Test(flag.value, True)])


def _steps(script: Script, calls: list[cst.Call]) -> Iterator[_Decision]:
    """Yield each `optimizer.step()` or `scaler.step(optimizer)` under a test of a remainder."""
    for call in calls:
        if re.search(r"(opt|scaler)[^.]*\.step$", script.text(call.func), re.IGNORECASE):
            yield from _window(script, call, list(on.conditions(script, call)))


def _window(script: Script, node: cst.CSTNode, tests: list[Test]) -> Iterator[_Decision]:
    found = on.only_modulo(script, [part for test in tests for part in on.any_of(script, test)])
    if found is not None and found[0].size != "1":
        modulo, others = found
        loop = on.counting_loop(script, modulo.counter, node)
        start = None if loop is None else on.first_value(script, modulo.counter, loop, node)
        texts = {each: script.text(each.expression) for each in others}
        if all(_LAST.search(texts[each]) or _is_constant(script, each, loop) for each in others):
            yield _Decision(node, modulo, others, loop, start)


def _wrong_place(script: Script, window: _Decision) -> str:
    size, equal = window.modulo.size, window.modulo.equal
    if equal and window.place == 0:
        return (
            f"gradients are exchanged on the first micro-batch of each window of {size}, not on the"
            " last: the others' stay on their rank"
        )
    if not equal and window.place == -1:
        return (
            f"no_sync() holds on the last micro-batch of each window of {size}, the one that must"
            " communicate"
        )
    if _stepped_elsewhere(script, window):
        return (
            "gradients are exchanged on another micro-batch than the one before optimizer.step():"
            " the replicas drift apart"
        )
    return ""


def _is_constant(script: Script, test: Test, loop: Loop | None) -> bool:
    """Whether the test has the same value in every iteration, so that it cannot detect the last
    one.
    """
    called = [last_name(call) for call in script.calls(test.expression)]
    names = script.names(test.expression)
    for bound in (each.node for name in names for each in script.lookup(name, test.expression)):
        if isinstance(bound, cst.Param) if loop is None else script.inside(bound, loop):
            return False
    return all(_HARMLESS.fullmatch(name) for name in called)


def _stepped_elsewhere(script: Script, window: _Decision) -> bool:
    """Whether an optimizer step later in the same iteration depends on another residue of the
    same counter.
    """
    modulo = window.modulo
    for step in _steps(script, script.calls(window.loop or script.scope(window.node), "step")):
        changed = any(
            script.before(window.node, each.node) and script.before(each.node, step.node)
            for each in script.lookup(modulo.counter, window.node)
        )
        other = step.modulo.residue != modulo.residue and modulo.equal
        same = replace(step.modulo, residue=modulo.residue) == modulo
        if script.before(window.node, step.node) and same and other and not changed:
            return True
    return False


def _loses_its_tail(script: Script, window: _Decision) -> bool:
    """Whether the last, short window is lost. False if the number of iterations may be a multiple
    of N by construction, or if the loop may end early.
    """
    loop, modulo = window.loop, window.modulo
    counted = on.counted_call(loop) if loop is not None else None
    if loop is None or counted is None or not modulo.equal or window.place != -1:
        return False
    if any(script.within(loop, cst.Break, cst.Return)):
        return False
    if not all(_is_constant(script, each, loop) for each in window.others):
        return False
    iterated = counted.args[0].value if last_name(counted) == "enumerate" else counted
    meant = [
        on.definition(script, each) for each in (iterated, *(arg.value for arg in counted.args))
    ]
    for text in (script.text(each) for each in (iterated, *meant)):
        if _ENDLESS.search(text) or _mentions(text, modulo.size):
            return False
    sums = script.within(script.scope(loop), cst.BinaryOperation)
    return not any(_divides(script, each, modulo) for each in sums)


def _divides(script: Script, node: cst.BinaryOperation, modulo: Modulo) -> bool:
    """Whether the script computes `len(loader) % N` or `n // N * N`, and so may handle the tail."""
    left, right = script.text(node.left), script.text(node.right)
    if isinstance(node.operator, cst.Multiply):
        return "//" in left or "//" in right
    divided = isinstance(node.operator, cst.Modulo) and right == modulo.size
    return divided and not _mentions(left, modulo.counter)


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", text) is not None
