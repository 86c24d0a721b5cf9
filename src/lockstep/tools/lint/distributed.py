"""What belongs to data-parallel training: collectives, wrapped models, blocks without gradients."""

from __future__ import annotations

import re
from collections.abc import Collection

import libcst as cst

from lockstep.tools.lint.script import Script, argument, dotted, last_name

_PLACES = {
    0: "barrier monitored_barrier",
    2: "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all broadcast"
    " broadcast_object_list",
    3: "gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter"
    " scatter_object_list",
    4: "all_to_all_single",
}
_GROUP = {name: place for place, names in _PLACES.items() for name in names.split()}
"""Collectives, with the place of `group` among the positional arguments."""
_TORCH = re.compile(r"torch\.distributed\.(distributed_c10d\.)?(?P<last>\w+)")
_LOCKSTEP = re.compile(r"lockstep\.(evaluate|train|collectives\.(all_reduce|broadcast|all_gather))")
_WORLDS = ("lockstep.init", "lockstep.World.current", "lockstep.World", "lockstep.world.World")
_WORLD = ("barrier", "agree", "mean", "subgroup")
_WRAPPERS = ("DistributedDataParallel", "DDP")


def collective(script: Script, call: cst.Call) -> str:
    """What a message calls a call in which every rank takes part; "" for others, and for a
    collective of a group.
    """
    name, last = script.name(call.func), last_name(call)
    if _LOCKSTEP.fullmatch(name):
        return "" if _of_a_group(script, call, 4) else name
    if _TORCH.fullmatch(name) and last in _GROUP:
        return "" if _of_a_group(script, call, _GROUP[last]) else f"dist.{last}"
    match call.func:
        case cst.Attribute(attr=cst.Name("wait_for_everyone")):
            return last
        case cst.Attribute(value=world) if last in _WORLD and _is_world(script, world):
            return f"world.{last}"
    return ""


def _of_a_group(script: Script, call: cst.Call, place: int) -> bool:
    return not re.fullmatch(r"|None|(.*\.)?WORLD", script.text(argument(call, "group", place)))


def _is_world(script: Script, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Call):
        return script.name(node.func) in _WORLDS
    for bound in script.lookup(dotted(node), node):
        match bound.value, bound.node:
            case (cst.Call(func=kind), _) | (_, cst.Param(annotation=cst.Annotation(kind))):
                return script.name(kind) in _WORLDS
    return False


def is_torch_class(script: Script, node: cst.CSTNode, names: Collection[str]) -> bool:
    """Is this one of torch's (or apex's) classes of that name? Also by a star import from
    torch's modules.
    """
    full = script.name(node)
    known = dotted(node).split(".")[0] in script.imports
    homes = {full} if known else script.imports.get("*", ()) if "." not in full else ()
    torch = any(re.match(r"(torch|apex)\b", home) for home in homes)
    return torch and full.rpartition(".")[2] in names


def wrapper(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> cst.Call | None:
    """The call of a DistributedDataParallel, torch's or Lockstep's, that a name at `use` is
    bound to.
    """
    bound = script.lookup(dotted(node), use)
    if not dotted(node).startswith("self."):
        bound = [each for each in bound if _is_before(script, each.node, use)]
    value = bound[-1].value if bound else None
    for made in (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,):
        if not isinstance(made, cst.Call):
            continue
        if _is_ours(script, made) or is_torch_class(script, made.func, _WRAPPERS):
            return made
    return None


def _is_before(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> bool:
    return script.before(node, use) or script.scope(node) is not script.scope(use)


def _is_ours(script: Script, call: cst.Call) -> bool:
    return re.fullmatch(r"lockstep\..*DistributedDataParallel", script.name(call.func)) is not None


def is_torch_wrapper(script: Script, node: cst.CSTNode, use: cst.CSTNode) -> bool:
    """Is a name at `use` torch's DistributedDataParallel for sure?"""
    values = [each.value for each in script.lookup(dotted(node), use)]
    ours = any(isinstance(value, cst.Call) and _is_ours(script, value) for value in values)
    return wrapper(script, node, use) is not None and not ours


def without_gradients(script: Script, node: cst.CSTNode) -> bool:
    """Is the line under torch.no_grad(), inference_mode() or set_grad_enabled(False), by a block
    or a decorator?
    """
    around = list(getattr(script.scope(node), "decorators", ()))
    for above, _ in script.ancestors(node):
        around += above.items if isinstance(above, cst.With) else ()
    words = r"no_grad|inference_mode|set_grad_enabled"
    return any(re.search(words, script.text(each)) for each in around)
