"""The calls of torch, accelerate, Fabric and Lockstep that the rules know."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from lockstep.tools.lint.script import Script, With, argument, dotted, last_name

_GROUP = {
    "new_group": -1,
    "new_subgroups": -1,
    "barrier": 0,
    "monitored_barrier": 0,
    "all_reduce": 2,
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_to_all": 2,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
    "all_to_all_single": 4,
}
"""The position of `group` among the arguments, by collective."""
_TORCH = re.compile(r"torch\.distributed\.(distributed_c10d\.)?(?P<last>\w+)")
_LOCKSTEP = re.compile(r"lockstep\.(evaluate|train|collectives\.(all_reduce|broadcast|all_gather))")
_WORLDS = ("lockstep.init", "lockstep.World.current", "lockstep.World", "lockstep.world.World")
_WORLD = ("barrier", "agree", "mean", "subgroup")
_WRAPPERS = ("DistributedDataParallel", "DDP")


def collective(script: Script, call: ast.Call) -> str:
    """Return the name, for messages, of a call that every rank must make. Return "" for other
    calls, and for a collective of a group.
    """
    name = script.name(call.func)
    last = last_name(call)
    if _LOCKSTEP.fullmatch(name):
        return "" if _of_a_group(script, call, 4) else name
    if _TORCH.fullmatch(name) and last in _GROUP:
        return "" if _of_a_group(script, call, _GROUP[last]) else f"dist.{last}"
    if not isinstance(call.func, ast.Attribute):
        return ""
    if last == "wait_for_everyone":
        return last
    return f"world.{last}" if last in _WORLD and _is_world(script, call.func.value) else ""


def _of_a_group(script: Script, call: ast.Call, position: int) -> bool:
    return not re.fullmatch(r"|None|(.*\.)?WORLD", script.text(argument(call, "group", position)))


def _is_world(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return script.name(node.func) in _WORLDS
    for binding in script.lookup(dotted(node), node):
        match binding.value, binding.node:
            case (ast.Call(kind), _) | (_, ast.arg(annotation=ast.expr() as kind)):
                return script.name(kind) in _WORLDS
    return False


def reduces_gradient(script: Script, call: ast.Call) -> bool:
    """Whether a call is `all_reduce(p.grad)`."""
    if not collective(script, call).endswith(".all_reduce"):
        return False
    return dotted(argument(call, "tensor", 0)).endswith((".grad", ".grad.data"))


def is_torch_class(script: Script, node: ast.expr, names: Collection[str]) -> bool:
    """Whether a node names one of these classes of torch (or apex), also by a star import from a
    module of torch.
    """
    full = script.name(node)
    if full.rpartition(".")[2] not in names:
        return False
    homes: Collection[str] = ()
    if dotted(node).split(".")[0] in script.imports:
        homes = {full}
    elif "." not in full:
        homes = script.imports.get("*", ())
    return any(re.match(r"(torch|apex)\b", home) for home in homes)


def wrapper(script: Script, node: ast.expr, use: ast.expr) -> ast.Call | None:
    """Return the call of torch's or Lockstep's DistributedDataParallel that a name at `use` is
    bound to.
    """
    name = dotted(node)
    for binding in reversed(script.lookup(name, use)):
        same_scope = script.scope(binding.node) is script.scope(use)
        if same_scope and script.before(use, binding.node) and not name.startswith("self."):
            continue
        for call in alternatives(binding.value):
            if is_lockstep_wrapper(script, call) or is_torch_class(script, call.func, _WRAPPERS):
                return call
        return None
    return None


def alternatives(value: ast.expr | None) -> Iterator[ast.Call]:
    """Yield the calls that a value is: itself, or the branches of a conditional expression."""
    for branch in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
        if isinstance(branch, ast.Call):
            yield branch


def is_lockstep_wrapper(script: Script, call: ast.Call) -> bool:
    return re.fullmatch(r"lockstep\..*DistributedDataParallel", script.name(call.func)) is not None


def without_gradients(script: Script, node: ast.AST) -> bool:
    """Whether a line is under torch.no_grad(), inference_mode() or set_grad_enabled(), except
    set_grad_enabled(True), in a with block or by a decorator.
    """
    around: list[ast.AST] = [*getattr(script.scope(node), "decorator_list", ())]
    for above, _ in script.ancestors(node):
        if isinstance(above, With):
            around += above.items
    words = r"no_grad|inference_mode|set_grad_enabled(?!\((mode\s*=\s*)?True\))"
    return any(re.search(words, script.text(context)) for context in around)
