"""Tests that hold on some ranks only: `rank == 0`, `dist.get_rank() != 0`, `is_main_process`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from lockstep.lint.conditions import Test, all_of, any_of
from lockstep.lint.modulo import number
from lockstep.lint.source import Source, dotted, last_name

_RANK = {
    "rank",
    "local_rank",
    "global_rank",
    "world_rank",
    "ddp_rank",
    "ddp_local_rank",
    "dist_rank",
    "process_index",
    "local_process_index",
}
_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID"}
_MAIN = re.compile(r"^(is_)?(local_|world_|global_)?(main|master|rank_?0|rank_?zero|global_zero|zero_rank)(_process|_rank)?$", re.I)
_MAIN_CALL = re.compile(r"^is_(local_|global_)?(main|master|rank_?0|rank_?zero)(_process|_rank)?$", re.I)
_ALONE = re.compile(r"distributed|ddp|world_size|is_initialized|is_available|multi_?gpu|num_processes|nprocs|world\.size", re.I)


@dataclass(frozen=True, slots=True)
class Side:
    """The ranks for which `rank == number` is `inside`."""

    number: int
    inside: bool


def side(source: Source, test: Test) -> Side | None:
    """Which ranks pass; None for a test that does not depend on the rank, or that one process alone has to pass as well."""
    parts = all_of(source, test)
    found = [each for part in parts if (each := _single(source, part)) is not None]
    if found:
        alone = any(_ALONE.search(ast.unparse(part.expression)) and not _single(source, part) and _means_alone(part) for part in parts)
        return None if alone else found[0]
    parts = any_of(source, test)  # rank == 0 or not distributed
    found = [each for part in parts if (each := _single(source, part)) is not None]
    rest = [part for part in parts if _single(source, part) is None]
    return (
        found[0] if len(found) == 1 and all(_ALONE.search(ast.unparse(part.expression)) and _means_alone(part) for part in rest) else None
    )


def _means_alone(part: Test) -> bool:
    """`not distributed`, `world_size == 1`."""
    expression = part.expression
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        bound, operator = number(expression.comparators[0]), expression.ops[0]
        one = isinstance(operator, (ast.Eq, ast.LtE)) and bound == 1
        more = (isinstance(operator, ast.Gt) and bound == 1) or (isinstance(operator, ast.NotEq) and bound == 1)
        return one if part.value else more
    return not part.value


def _single(source: Source, part: Test) -> Side | None:
    expression = part.expression
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        return _compared(source, expression, part.value)
    if isinstance(expression, ast.Call):
        return Side(0, part.value) if _MAIN_CALL.match(last_name(expression)) else None
    if dotted(expression) is not None:
        if _MAIN.match(last_name(expression)):
            return Side(0, part.value)
        if _is_rank(source, expression):
            return Side(0, not part.value)
    return None


def _compared(source: Source, expression: ast.Compare, value: bool) -> Side | None:
    left, operator, right = expression.left, expression.ops[0], expression.comparators[0]
    if isinstance(operator, (ast.Eq, ast.NotEq)) and _is_rank(source, right):
        left, right = right, left
    if not _is_rank(source, left):
        return None
    if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(right, (ast.List, ast.Tuple, ast.Set)):
        numbers = {number(each) for each in right.elts}  # -1: not distributed, as older scripts say it
        return Side(0, isinstance(operator, ast.In) == value) if 0 in numbers and numbers <= {0, -1} else None
    compared = (
        int(right.value) if isinstance(right, ast.Constant) and isinstance(right.value, str) and right.value.isdigit() else number(right)
    )
    if compared is None:
        return None
    if isinstance(operator, (ast.Eq, ast.NotEq)):
        return Side(compared, isinstance(operator, ast.Eq) == value) if compared >= 0 else None
    if isinstance(operator, ast.Gt) and compared == 0:
        return Side(0, not value)
    return Side(0, value) if isinstance(operator, ast.Lt) and compared == 1 else None


def _is_rank(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        if last_name(node) == "int" and len(node.args) == 1:
            return _is_rank(source, node.args[0])
        if last_name(node) in {"get_rank", "get_local_rank", "get_node_local_rank"}:
            return not node.args and not node.keywords  # of a group: the rank in it
        return last_name(node) in {"getenv", "get"} and bool(node.args) and _variable(node.args[0])
    if isinstance(node, ast.Subscript):
        return _variable(node.slice)
    name = dotted(node)
    if name is None or last_name(node).lower() not in _RANK or name.endswith("group.rank"):
        return False
    return not any(isinstance(each.node, (ast.For, ast.AsyncFor, ast.comprehension)) for each in source.lookup(name, node))


def _variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _VARIABLES
