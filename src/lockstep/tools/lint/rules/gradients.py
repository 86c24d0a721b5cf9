"""Rules for gradients that only some ranks reduce, that are clipped before they are complete, or
that bypass the wrapper; and for losses whose scale depends on the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

import libcst as cst

from lockstep.tools.lint.conditions import Test, all_of, conditions
from lockstep.tools.lint.rules.accumulation import BLOCKS
from lockstep.tools.lint.script import (
    Problem,
    Script,
    Value,
    argument,
    collective,
    dotted,
    is_torch_wrapper,
    last_name,
    without_gradients,
)

_CLIPS = re.compile(r"clip_grad_norm_?|clip_grad_value_?|clip_gradients|clip_grads_with_norm_")
_BY_HAND = re.compile(r"reduce|average|sync_grad", re.IGNORECASE)
_REDUCES = re.compile(r"reduce|average|sync(?!hronize$)(?<!no_sync)", re.IGNORECASE)
_OF_GRADIENTS = re.compile(r"(reduce|average|sync|mean)\w*grad|requires_grad|toggle", re.IGNORECASE)


def gradient_conditional_collective(script: Script) -> Iterator[Problem]:
    for call in script.all(cst.Call):
        name = collective(script, call)
        if name and any(_has_gradient(script, test) for test in _tests(script, call)):
            yield Problem(call, {"what": name})


def _tests(script: Script, call: cst.Call) -> Iterator[Test]:
    """Yield the tests that hold at a call: its conditions, and those of an earlier
    `if ...: continue` in the loop.
    """
    for test in conditions(script, call):
        yield from all_of(script, test)
    for loop in script.loops(call)[:1]:
        for node in script.within(loop, cst.If):
            if script.before(node, call) and any(script.within(node.body, cst.Continue)):
                yield Test(node.test, False)


def _has_gradient(script: Script, test: Test) -> bool:
    wanted = r"[\w.]+\.grad is not None" if test.value else r"[\w.]+\.grad is None"
    return re.fullmatch(wanted, script.text(test.expression)) is not None


def sum_loss(script: Script) -> Iterator[Problem]:
    modules = " ".join(chain(*script.imports.values()))
    if not re.search(r"\btorch\.(distributed|nn\.parallel)", modules):
        return
    for call in script.all(cst.Call):
        if last_name(call) != "backward" or call.args or not isinstance(call.func, cst.Attribute):
            continue
        loss: Value = call.func.value
        for binding in script.lookup(dotted(loss), call):
            if script.before(binding.node, call):
                loss = binding.value
        if not isinstance(loss, cst.Call) or last_name(loss) != "sum" or loss.args:
            continue
        if script.calls(script.scope(call), "step"):
            yield Problem(loss, {})


def clip_inside_no_sync(script: Script) -> Iterator[Problem]:
    for call in script.all(cst.Call):
        name = last_name(call)
        if not _CLIPS.fullmatch(name):
            continue
        blocks = [above for above, _ in script.ancestors(call) if isinstance(above, cst.With)]
        if any(_holds_for(script, block, call) for block in blocks):
            yield Problem(call, {"name": name, "where": "inside no_sync()"})
        elif _reduced_later(script, call):
            yield Problem(call, {"name": name, "where": "before the gradients are reduced"})


def _holds_for(script: Script, block: cst.With, call: cst.Call) -> bool:
    """Whether the block skips the exchange of gradients whenever it clips."""
    contexts = [item.item for item in block.items if _holds_back(script, item.item)]
    if not contexts:
        return False
    for other in script.calls(block):
        if script.before(other, call) and _BY_HAND.search(last_name(other)):
            return False
    if all(last_name(context) == "no_sync" for context in contexts):
        return True
    return not any(script.inside(test.expression, block) for test in conditions(script, call))


def _holds_back(script: Script, expression: cst.BaseExpression) -> bool:
    """Whether an expression is `model.no_sync()`, a conditional with it as a branch, or a name
    that is bound to either.
    """
    values: list[Value] = [expression]
    name = expression.func if isinstance(expression, cst.Call) else expression
    if isinstance(name, cst.Name):
        values += [binding.value for binding in script.lookup(name.value, name)]
    for value in values:
        if value is None:
            continue
        for node in script.within(value, cst.Attribute):
            call = script.parents[node]
            off = isinstance(call, cst.Call) and script.text(argument(call, "enabled")) == "False"
            if node.attr.value in BLOCKS and not off:
                return True
    return False


def _reduced_later(script: Script, clip: cst.Call) -> bool:
    """Whether the iteration runs a backward before `clip` and reduces gradients by hand after."""
    choices = {test.expression: test.value for test in conditions(script, clip)}
    for loop in script.loops(clip)[:1]:
        if not any(script.before(backward, clip) for backward in script.calls(loop, "backward")):
            return False
        for call in script.calls(loop):
            if not script.before(clip, call) or not _reduces(script, call):
                continue
            tests = conditions(script, call)
            if all(choices.get(test.expression, test.value) == test.value for test in tests):
                return True
    return False


def _reduces(script: Script, call: cst.Call) -> bool:
    """Whether a call is `all_reduce(p.grad)`, or calls a function of this file that does it."""
    if collective(script, call).endswith(".all_reduce"):
        return dotted(argument(call, "tensor", 0)).endswith((".grad", ".grad.data"))
    function = script.called(call)
    inner = script.calls(function, "all_reduce") if function is not None else []
    return any(_reduces(script, inner_call) for inner_call in inner)


def forward_through_module(script: Script) -> Iterator[Problem]:
    for call in script.all(cst.Call):
        module = call.func
        if isinstance(module, cst.Attribute) and last_name(module) == "forward":
            module = module.value
        if not isinstance(module, cst.Attribute) or last_name(module) != "module":
            continue
        wrapper = module.value
        name = dotted(wrapper)
        if is_torch_wrapper(script, wrapper, call) and _trains(script, call, name):
            yield Problem(call.func, {"name": name}, wrapper)


def _trains(script: Script, node: cst.Call, name: str) -> bool:
    """Whether a forward of `.module` leads to a backward that nothing reduces. False without
    gradients, in eval mode, if detached, or if the script reduces gradients itself.
    """
    around = script.calls(script.scope(node))
    if without_gradients(script, node) or last_name(script.parents[node]) == "detach":
        return False
    if not any(last_name(call) == "backward" for call in around):
        return False
    for call in around:
        # the wrapper's forward prepares the reduction, or the backward is of another model
        forward = is_torch_wrapper(script, call.func, call) and not without_gradients(script, call)
        if forward or _by_hand(script, call, name):
            return False
    modes = re.compile(rf"{re.escape(name)}(\.module)?\.(train|eval)")
    before = [dotted(call.func) for call in around if script.before(call, node)]
    modes_before = [called for called in before if modes.fullmatch(called)]
    return not modes_before or modes_before[-1].endswith("train")


def _by_hand(script: Script, call: cst.Call, name: str) -> bool:
    """Whether a call reduces or disables gradients by hand, as far as its name, its arguments or a
    `.grad` in the same function tell.
    """
    called = last_name(call)
    if not _REDUCES.search(called):
        return _OF_GRADIENTS.search(called) is not None
    for arg in call.args:
        text = script.text(arg.value)
        if text == name or "param" in text:
            return True
    attributes = script.within(script.scope(call), cst.Attribute)
    return any(node.attr.value == "grad" for node in attributes)
