"""Which names are wrapped models, and whose wrapper it is."""

from __future__ import annotations

import ast

from lockstep.lint.source import Source, dotted

_NAMES = {"DistributedDataParallel", "DDP"}


def is_torch_class(source: Source, node: ast.AST, names: set[str]) -> bool:
    """Is this one of torch's (or apex's) classes of that name? Also by a star import or a compatible name from torch's modules."""
    full = source.full_name(node)
    if full is None or full.rpartition(".")[2] not in names:
        return False
    if source.is_imported(node):
        return full.split(".")[0] in {"torch", "apex"}
    return "." not in full and any(home.split(".")[0] == "torch" for home in source.imports.get("*", ()))


def torch_wrapper(source: Source, node: ast.AST, use: ast.AST) -> ast.Call | None:
    """The call of torch's DistributedDataParallel that `node`, a name at `use`, is bound to; None if it may be something else there."""
    name = dotted(node)
    if name is None or any("lockstep" in (_class_of(source, each.value) or "") for each in source.lookup(name, use)):
        return None
    return wrapper(source, node, use)


def wrapper(source: Source, node: ast.AST, use: ast.AST) -> ast.Call | None:
    """The call of a DistributedDataParallel, torch's or Lockstep's, that `node`, a name at `use`, is bound to."""
    name = dotted(node)
    if name is None:
        return None
    here = source.scope(use)
    before = [
        each
        for each in source.lookup(name, use)
        if each.line <= getattr(use, "lineno", 0) or name.startswith("self.") or source.scope(each.node) is not here
    ]
    if not before:
        return None
    bound = before[-1].value
    for value in (bound.body, bound.orelse) if isinstance(bound, ast.IfExp) else (bound,):
        if isinstance(value, ast.Call) and (is_torch_class(source, value.func, _NAMES) or _is_ours(source, value.func)):
            return value
    return None


def _is_ours(source: Source, node: ast.AST) -> bool:
    full = source.full_name(node) or ""
    return full.startswith("lockstep.") and full.endswith(".DistributedDataParallel")


def _class_of(source: Source, value: ast.expr | None) -> str | None:
    return source.full_name(value.func) if isinstance(value, ast.Call) else None


def without_gradients(source: Source, node: ast.AST) -> bool:
    """Is the line under torch.no_grad(), inference_mode() or set_grad_enabled(False), by a block or a decorator?"""
    for above in source.ancestors(node):
        if isinstance(above, (ast.With, ast.AsyncWith)):
            expressions = [item.context_expr for item in above.items]
        elif isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            expressions = above.decorator_list
        else:
            continue
        if any(word in ast.unparse(each) for each in expressions for word in ("no_grad", "inference_mode", "set_grad_enabled")):
            return True
    return False
