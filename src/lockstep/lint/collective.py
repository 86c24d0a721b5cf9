"""Calls in which every rank has to take part."""

from __future__ import annotations

import ast

from lockstep.lint.source import Source, dotted, keyword, last_name

# name -> the place of `group` among the positional arguments
_TORCH = {
    "all_reduce": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "monitored_barrier": 0,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
}
_LOCKSTEP = {"lockstep.collectives.all_reduce", "lockstep.collectives.broadcast", "lockstep.collectives.all_gather"}
_LOCKSTEP_RUNS = {"lockstep.evaluate", "lockstep.train"}
_WORLD = {"barrier", "agree", "mean", "subgroup"}


def collective(source: Source, call: ast.Call) -> str | None:
    """How a message calls it; None for anything else, and for a collective of a group, which may be of these ranks only."""
    name = source.full_name(call.func) or ""
    if name in _LOCKSTEP_RUNS:
        return name
    if name in _LOCKSTEP:
        return None if _of_a_group(source, call, 4) else name
    module, _, last = name.rpartition(".")
    if module in {"torch.distributed", "torch.distributed.distributed_c10d"} and last in _TORCH:
        return None if _of_a_group(source, call, _TORCH[last]) else f"dist.{last}"
    if isinstance(call.func, ast.Attribute):
        if call.func.attr == "wait_for_everyone":
            return "wait_for_everyone"
        if call.func.attr in _WORLD and _is_world(source, call.func.value):
            return f"world.{call.func.attr}"
    return None


def _of_a_group(source: Source, call: ast.Call, place: int) -> bool:
    group = keyword(call, "group") or (call.args[place] if len(call.args) > place else None)
    return not (group is None or (isinstance(group, ast.Constant) and group.value is None) or last_name(group) == "WORLD")


def _is_world(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return (source.full_name(node.func) or "") in {"lockstep.init", "lockstep.World.current"}
    if (name := dotted(node)) is None:
        return False
    for bound in source.lookup(name, node):
        if isinstance(bound.value, ast.Call) and (source.full_name(bound.value.func) or "") in {"lockstep.init", "lockstep.World.current"}:
            return True
        if isinstance(bound.node, ast.arg) and bound.node.annotation is not None:
            return source.full_name(bound.node.annotation) in {"lockstep.World", "lockstep.world.World"}
    return False
