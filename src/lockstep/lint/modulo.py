"""Counters and their modulo tests: which micro-batch of a window does `(i + 1) % N == 0` mean?"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.lint.conditions import Test
from lockstep.lint.source import Loop, Source, dotted, keyword, last_name


@dataclass(frozen=True, slots=True)
class Modulo:
    """True where counter ≡ residue (mod divisor) if `equal`, everywhere else if not."""

    counter: str
    divisor: ast.expr
    residue: int
    equal: bool

    @property
    def text(self) -> str:
        return ast.unparse(self.divisor)

    def normal(self, residue: int) -> int:
        """The residue counted from the end of a window where it is nearer: N - 1 is -1."""
        size = number(self.divisor)
        if size is None or size < 1:
            return residue
        residue %= size
        return residue - size if residue == size - 1 else residue


def number(node: ast.AST | None) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and (value := number(node.operand)) is not None:
        return -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def modulo(test: Test) -> Modulo | None:
    """`i % N`, `(i + 1) % N == 0`, `i % N != N - 1` and the like; None for anything else."""
    expression, equal, residue = test.expression, False, 0
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        left, operator, right = expression.left, expression.ops[0], expression.comparators[0]
        if isinstance(operator, (ast.Eq, ast.NotEq)) and _remainder(right) is not None:
            left, right = right, left
        remainder = _remainder(left)
        if remainder is None:
            return None
        if number(right) != 0:
            if not _is_one_less(right, remainder.right):
                return None
            residue = -1
        if isinstance(operator, ast.Eq):
            equal = True
        elif not isinstance(operator, ast.NotEq) and not isinstance(operator, ast.Lt if residue else ast.Gt):
            return None
    else:
        remainder = _remainder(expression)
        if remainder is None:
            return None
    counter, offset = _shifted(remainder.left)
    if counter is None:
        return None
    return Modulo(counter, remainder.right, residue - offset, equal == test.value)


def _remainder(node: ast.expr) -> ast.BinOp | None:
    return node if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else None


def _is_one_less(node: ast.expr, divisor: ast.expr) -> bool:
    if (size := number(divisor)) is not None and size > 1:
        return number(node) == size - 1
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and number(node.right) == 1
        and ast.dump(node.left) == ast.dump(divisor)
    )


def _shifted(node: ast.expr) -> tuple[str | None, int]:
    """`i + 1` as ("i", 1)."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        left, right = node.left, node.right
        if isinstance(node.op, ast.Add) and number(left) is not None:
            left, right = right, left
        if (offset := number(right)) is not None:
            return dotted(left), offset if isinstance(node.op, ast.Add) else -offset
    return dotted(node), 0


def counting_loop(source: Source, counter: str, node: ast.AST) -> Loop | None:
    """The innermost loop around `node` that gives the counter its values."""
    for loop in source.loops(node):
        if any(source.inside(each.node, loop) for each in source.lookup(counter, node)):
            return loop
    return None


def first_value(source: Source, counter: str, node: ast.AST) -> int | None:
    """What the counter is at `node` on the loop's first turn; None where the text does not tell."""
    loop = counting_loop(source, counter, node)
    if loop is None:
        return None
    bound = source.lookup(counter, node)
    within = [each for each in bound if source.inside(each.node, loop)]
    if len(within) != 1:
        return None
    if within[0].node is loop and isinstance(loop, (ast.For, ast.AsyncFor)):
        return _start(source, loop, counter)
    step = within[0].node
    if (
        source.parents[step] is not loop
        or not isinstance(step, ast.AugAssign)
        or not isinstance(step.op, ast.Add)
        or number(step.value) != 1
    ):
        return None
    before = [each for each in bound if each not in within]
    if len(before) != 1 or (start := number(before[0].value)) is None or before[0].line > loop.lineno:
        return None
    return start + (step.lineno < getattr(node, "lineno", 0))


def _start(source: Source, loop: ast.For | ast.AsyncFor, counter: str) -> int | None:
    counted = counted_call(loop.iter)
    if counted is None:
        return None
    if last_name(counted) == "range":
        if len(counted.args) == 3:
            return None
        return 0 if len(counted.args) == 1 else number(counted.args[0])
    if not isinstance(loop.target, ast.Tuple) or dotted(loop.target.elts[0]) != counter:
        return None
    start = counted.args[1] if len(counted.args) > 1 else keyword(counted, "start")
    return 0 if start is None else number(start)


def counted_call(node: ast.expr) -> ast.Call | None:
    """The enumerate(...) or range(...) of a loop, also inside a progress bar: `tqdm(enumerate(x), ...)`."""
    if isinstance(node, ast.Call):
        if last_name(node) in {"enumerate", "range"}:
            return node
        if "tqdm" in last_name(node) or last_name(node) in {"track", "trange"}:
            return counted_call(node.args[0]) if node.args else None
    return None
