"""A forward that goes past torch's wrapper. Lockstep's hooks are on the parameters: there it is
right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from lockstep.tools.lint.distributed import is_torch_wrapper, without_gradients
from lockstep.tools.lint.script import Problem, Script, dotted, last_name

_REDUCES = re.compile(r"reduce|average|sync(?!hronize$)(?<!no_sync)", re.IGNORECASE)
_OF_GRADIENTS = re.compile(r"(reduce|average|sync|mean)\w*grad|requires_grad|toggle", re.IGNORECASE)


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
            wrong = f"a forward through {name}.module goes past the wrapper"
            harm = "gradients are not averaged, and the replicas drift apart"
            yield Problem(call.func, f"{wrong}: {harm}", f"call {name}(...) instead", wrapper)


def _trains(script: Script, node: cst.Call, name: str) -> bool:
    """Does a backward follow from it? Not without gradients, in eval mode, or detached; nor if
    the script reduces itself.
    """
    around = script.calls(script.scope(node))
    if without_gradients(script, node) or last_name(script.parents[node]) == "detach":
        return False
    if not any(last_name(call) == "backward" for call in around):
        return False
    for call in around:
        # a forward of the wrapper prepares the reduction, or the gradients are another model's
        forward = is_torch_wrapper(script, call.func, call) and not without_gradients(script, call)
        if forward or _by_hand(script, call, name):
            return False
    modes = re.compile(rf"{re.escape(name)}(\.module)?\.(train|eval)")
    before = [dotted(call.func) for call in around if script.before(call, node)]
    modes_before = [each for each in before if modes.fullmatch(each)]
    return not modes_before or modes_before[-1].endswith("train")


def _by_hand(script: Script, call: cst.Call, name: str) -> bool:
    """Gradients that the script reduces, or switches off, itself: by the call's name, what it is
    given, or a `.grad` nearby.
    """
    if not _REDUCES.search(last_name(call)):
        return _OF_GRADIENTS.search(last_name(call)) is not None
    given = [script.text(arg.value) for arg in call.args]
    attributes = script.within(script.scope(call), cst.Attribute)
    nearby = any(node.attr.value == "grad" for node in attributes)
    return nearby or name in given or any("param" in each for each in given)
