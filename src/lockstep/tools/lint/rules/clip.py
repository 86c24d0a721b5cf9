"""Clipping a gradient that is not complete yet."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from lockstep.tools.lint.conditions import conditions
from lockstep.tools.lint.distributed import collective
from lockstep.tools.lint.rules.accumulation import BLOCKS
from lockstep.tools.lint.script import Problem, Script, argument, dotted, last_name

_CLIPS = re.compile(r"clip_grad_norm_?|clip_grad_value_?|clip_gradients|clip_grads_with_norm_")
_BY_HAND = re.compile(r"reduce|average|sync_grad", re.IGNORECASE)


def clip_inside_no_sync(script: Script) -> Iterator[Problem]:
    for call in script.all(cst.Call):
        name = last_name(call)
        if not _CLIPS.fullmatch(name):
            continue
        blocks = [above for above, _ in script.ancestors(call) if isinstance(above, cst.With)]
        if any(_holds_for(script, block, call) for block in blocks):
            wrong = (
                "inside no_sync() clips this rank's unfinished gradient by its own norm, before it"
                " is summed"
            )
            advice = "clip once, after the window's last backward and before step()"
            yield Problem(call, f"{name} {wrong}", advice)
        elif _reduced_later(script, call):
            wrong = "before the gradients are reduced clips each rank's part by another norm"
            yield Problem(call, f"{name} {wrong}", "reduce first, then clip once, before step()")


def _holds_for(script: Script, block: cst.With, call: cst.Call) -> bool:
    """Does the block hold gradients back whenever it clips?"""
    held = [item.item for item in block.items if _holds_back(script, item.item)]
    before = [each for each in script.calls(block) if script.before(each, call)]
    reduced = any(_BY_HAND.search(last_name(each)) for each in before)
    always = all(last_name(each) == "no_sync" for each in held)
    tested = any(script.inside(test.expression, block) for test in conditions(script, call))
    return bool(held) and not reduced and (always or not tested)


def _holds_back(script: Script, expression: cst.BaseExpression) -> bool:
    """`model.no_sync()`, also as one branch of a conditional, or a name that is bound to such a
    thing.
    """
    named = expression.func if isinstance(expression, cst.Call) else expression
    bound = script.lookup(named.value, named) if isinstance(named, cst.Name) else []
    for value in (expression, *(each.value for each in bound if each.value is not None)):
        for node in script.within(value, cst.Attribute):
            call = script.parents[node]
            off = isinstance(call, cst.Call) and script.text(argument(call, "enabled")) == "False"
            if node.attr.value in BLOCKS and not off:
                return True
    return False


def _reduced_later(script: Script, clip: cst.Call) -> bool:
    """Does a reduction by hand follow in the same turn of the loop, after a backward?"""
    choices = {test.expression: test.value for test in conditions(script, clip)}
    for loop in script.loops(clip)[:1]:
        if not any(script.before(each, clip) for each in script.calls(loop, "backward")):
            return False
        for call in script.calls(loop):
            tests = conditions(script, call)
            apart = any(choices.get(each.expression, each.value) != each.value for each in tests)
            if script.before(clip, call) and not apart and _reduces(script, call):
                return True
    return False


def _reduces(script: Script, call: cst.Call) -> bool:
    """`all_reduce(p.grad)`, or a function of this file that does it."""
    if collective(script, call).endswith(".all_reduce"):
        return dotted(argument(call, "tensor", 0)).endswith((".grad", ".grad.data"))
    function = script.called(call)
    inner = script.calls(function, "all_reduce") if function is not None else []
    return any(_reduces(script, each) for each in inner)
