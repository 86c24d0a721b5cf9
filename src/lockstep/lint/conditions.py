"""Under which conditions a line runs, taken apart into simple tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.source import Source, dotted


@dataclass(frozen=True, slots=True)
class Test:
    """An expression without and, or, not at its top, and the truth value it is to have."""

    expression: ast.expr
    value: bool


def conditions(source: Source, node: ast.AST) -> Iterator[Test]:
    """The tests of `if`, `x if c else y` and `c and x` around `node` in its function, the innermost first; all of them hold there."""
    below = node
    for above in source.ancestors(node):
        if isinstance(above, ast.If) and below is not above.test:
            yield Test(above.test, any(below is statement for statement in above.body))
        elif isinstance(above, ast.IfExp) and below is not above.test:
            yield Test(above.test, below is above.body)
        elif isinstance(above, ast.BoolOp):
            place = next(number for number, value in enumerate(above.values) if value is below)
            for earlier in above.values[:place]:
                yield Test(earlier, isinstance(above.op, ast.And))
        below = above


def any_of(source: Source, test: Test, depth: int = 8) -> list[Test]:
    """Tests of which at least one holds exactly if `test` does."""
    return _parts(source, test, ast.Or, depth)


def all_of(source: Source, test: Test, depth: int = 8) -> list[Test]:
    """Tests that hold together exactly if `test` does."""
    return _parts(source, test, ast.And, depth)


def _parts(source: Source, test: Test, joined: type[ast.boolop], depth: int) -> list[Test]:
    expression, value = test.expression, test.value
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        return _parts(source, Test(expression.operand, not value), joined, depth)
    if isinstance(expression, ast.BoolOp) and isinstance(expression.op, joined) == value:  # not (a and b) = not a or not b
        return [part for each in expression.values for part in _parts(source, Test(each, value), joined, depth)]
    if depth and (meaning := definition(source, expression)) is not None:
        return _parts(source, Test(meaning, value), joined, depth - 1)
    return [test]


def definition(source: Source, node: ast.expr) -> ast.expr | None:
    """The expression that a local name stands for, if only one can be meant: bound once in its function, or once in the loop around."""
    name = dotted(node)
    if name is None:
        return None
    found = source.bindings(source.scope(node)).get(name, []) if name.startswith("self.") else source.lookup(name, node)
    if len(found) > 1 and (loops := source.loops(node)):
        found = [each for each in found if source.inside(each.node, loops[0])]
    if len(found) != 1 or isinstance(found[0].node, (ast.With, ast.AsyncWith)) or found[0].line > getattr(node, "lineno", 0):
        return None
    return found[0].value
