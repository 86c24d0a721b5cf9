"""forward-through-module: training through `ddp.module(...)` goes past the wrapper, and nothing is exchanged.

torch's wrapper prepares its reduction in its own forward. Lockstep's hooks are on the parameters, so there it is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.source import Problem, Source, calls, dotted, last_name, local
from lockstep.lint.wrapped import torch_wrapper, without_gradients

NAME = "forward-through-module"
_REDUCES = re.compile(r"reduce|average|sync", re.I)
_OF_GRADIENTS = re.compile(r"(reduce|average|sync|mean)\w*grad|requires_grad|toggle", re.I)


def check(source: Source) -> Iterator[Problem]:
    for node in source.nodes:
        wrapper = _wrapper_gone_past(node)
        if wrapper is None or not isinstance(node, ast.Call) or torch_wrapper(source, wrapper, node) is None:
            continue
        if _trains(source, node, wrapper):
            name = dotted(wrapper)
            message = f"a forward through {name}.module goes past the wrapper: this rank's gradients are not averaged, and the replicas drift apart"
            yield Problem(node.lineno, NAME, f"{message}; call {name}(...) instead")


def _wrapper_gone_past(node: ast.AST) -> ast.expr | None:
    """`ddp` of `ddp.module(...)` and `ddp.module.forward(...)`."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Attribute) and called.attr == "forward":
        called = called.value
    return called.value if isinstance(called, ast.Attribute) and called.attr == "module" else None


def _trains(source: Source, node: ast.Call, wrapper: ast.expr) -> bool:
    """Does a backward follow from it? Not without gradients, in eval mode, or detached; nor if another call or code by hand reduces."""
    parent = source.parents[node]
    if without_gradients(source, node) or (isinstance(parent, ast.Attribute) and parent.attr == "detach"):
        return False
    around = list(calls(source.scope(node)))
    if not any(last_name(call) == "backward" for call in around) or any(_by_hand(source, call, wrapper) for call in around):
        return False
    if any(torch_wrapper(source, call.func, call) is not None and not without_gradients(source, call) for call in around):
        return False  # its forward has prepared the reduction; or the gradients through .module are another model's
    name = dotted(wrapper) or ""
    modes = [call for call in around if last_name(call) in {"train", "eval"} and call.lineno < node.lineno]
    modes = [
        call
        for call in modes
        if dotted(call.func) in {f"{name}{middle}{mode}" for middle in (".", ".module.") for mode in ("train", "eval")}
    ]
    return not modes or last_name(max(modes, key=lambda call: call.lineno)) == "train"


def _by_hand(source: Source, call: ast.Call, wrapper: ast.expr) -> bool:
    """Gradients that the script reduces, or switches off, itself: by the call's name, what it is given, or a `.grad` nearby."""
    if _OF_GRADIENTS.search(last_name(call)):
        return True
    if not _REDUCES.search(last_name(call)) or last_name(call) in {"no_sync", "synchronize"}:
        return False
    given = " ".join(ast.unparse(each) for each in (*call.args, *call.keywords))
    nearby = any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in local(source.scope(call)))
    return nearby or "param" in given or dotted(wrapper) in {dotted(each) for each in call.args}
