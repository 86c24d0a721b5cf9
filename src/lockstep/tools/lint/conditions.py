"""Find the conditions under which a line runs. Two kinds are understood: tests of a counter's
remainder, and tests that hold on some ranks only, such as `rank == 0` or `is_main_process`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.tools.lint.script import Loop, Script, Value, argument, dotted, last_name


@dataclass(frozen=True, slots=True)
class Test:
    """An expression and the truth value that it must have."""

    expression: ast.expr
    value: bool


def conditions(script: Script, node: ast.AST) -> Iterator[Test]:
    """Yield the tests of `if`, `x if c else y`, `c and x` around `node`, the innermost first. All
    of them hold at `node`.
    """
    for above, below in script.ancestors(node):
        match above:
            case ast.If(test, body) if below is not test:
                yield Test(test, below in body)
            case ast.IfExp(test, body) if below is not test:
                yield Test(test, below is body)
            case ast.BoolOp(joined, values):
                for value in values:
                    if value is below:
                        break
                    yield Test(value, isinstance(joined, ast.And))


def split(script: Script, test: Test, joined: type[ast.boolop], depth: int = 8) -> list[Test]:
    """Split a test into tests that all hold (`joined` is ast.And), or of which at least one holds
    (ast.Or), if and only if it holds.
    """
    parts: list[Test] = []
    match test.expression:
        case ast.UnaryOp(ast.Not(), negated):
            parts.append(Test(negated, not test.value))
        case ast.BoolOp(op, values) if isinstance(op, joined) == test.value:
            parts += [Test(value, test.value) for value in values]  # not (a and b): not a or not b
        case expression:
            meaning = script.definition(expression) if depth else None
            if meaning is None:
                return [test]
            parts.append(Test(meaning, test.value))
    tests: list[Test] = []
    for part in parts:
        tests += split(script, part, joined, depth - 1)
    return tests


_MODULO = re.compile(
    r"(?:0(?P<flipped>[=!]=))?"
    r"\(?(?P<counter>[A-Za-z_][\w.]*)(?P<offset>[+-]\d+)?\)?%(?P<size>[\w.]+)"
    r"(?:(?P<sign>[=!]=|[<>])(?P<value>[\w.]+(?:-1)?))?"
)


@dataclass(frozen=True, slots=True)
class Modulo:
    """A test that is true where counter = residue (mod size), or, if not `equal`, everywhere else.
    The last residue of a window is -1.
    """

    counter: str
    size: str
    residue: int
    equal: bool


def modulo(script: Script, test: Test) -> Modulo | None:
    """Parse `i % N`, `(i + 1) % N == 0`, `i % N != N - 1` and the like; None for other tests."""
    match = _MODULO.fullmatch(script.text(test.expression).replace(" ", ""))
    if match is None:
        return None
    size = match["size"]
    last = str(int(size) - 1) if size.isdigit() else f"{size}-1"
    value = match["value"] or "0"
    sign = match["flipped"] or match["sign"] or "!="
    residue = {last: -1, "0": 0}.get(value)
    if residue is None or sign == (">" if residue else "<"):
        return None
    residue -= int(match["offset"] or 0)
    return Modulo(match["counter"], size, residue, (sign == "==") == test.value)


def counting_loop(script: Script, counter: str, node: ast.AST) -> Loop | None:
    """The innermost loop around `node` that gives the counter its values."""
    bindings = script.lookup(counter, node)
    for loop in script.loops(node):
        if any(script.inside(binding.node, loop) for binding in bindings):
            return loop
    return None


def first_value(script: Script, counter: str, loop: Loop, node: ast.AST) -> int | None:
    """Return the counter's value at `node` in the loop's first iteration; None if unknown."""
    bindings = script.lookup(counter, node)
    within = [binding for binding in bindings if script.inside(binding.node, loop)]
    before = [binding for binding in bindings if script.before(binding.node, loop)]
    if len(within) != 1:
        return None
    change = within[0].node
    if change is loop:
        return _first_counted(script, loop, counter)
    if change not in loop.body or not script.text(change).endswith("+= 1") or len(before) != 1:
        return None
    start = _integer(before[0].value)
    return None if start is None else start + script.before(change, node)


def _first_counted(script: Script, loop: Loop, counter: str) -> int | None:
    call = counted_call(loop)
    if call is None or isinstance(loop, ast.While):
        return None
    if last_name(call) == "range":
        return _integer(call.args[0]) if len(call.args) == 2 else 0
    start = argument(call, "start", 1)
    match loop.target:
        case ast.Tuple([first, *_]) if dotted(first) == counter:
            return 0 if start is None else _integer(start)
    return None


def _integer(node: Value) -> int | None:
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.UnaryOp(ast.USub(), ast.Constant(int(number))):
            return -number
    return None


def counted_call(loop: Loop) -> ast.Call | None:
    """Return the enumerate(...) or range(...) of a loop, also if a progress bar wraps it:
    `tqdm(enumerate(x), ...)`.
    """
    node = None if isinstance(loop, ast.While) else loop.iter
    while isinstance(node, ast.Call) and node.args:
        name = last_name(node)
        if name in ("enumerate", "range"):
            return node
        node = node.args[0] if re.search(r"(tqdm|track|trange)$", name) else None
    return None


_HARMLESS = re.compile(
    r"isinstance|hasattr|getattr|len|get_world_size|is_initialized|is_available|bool"
)


def is_constant(script: Script, expression: ast.expr, loop: Loop | None) -> bool:
    """Whether an expression has the same value in every iteration of the loop."""
    for name in script.names(expression):
        for binding in script.lookup(name, expression):
            varies = isinstance(binding.node, ast.arg)
            if loop is not None:
                varies = script.inside(binding.node, loop)
            if varies:
                return False
    called = [last_name(call) for call in script.calls(expression)]
    return all(_HARMLESS.fullmatch(name) for name in called)


_RANK = re.compile(
    r"(int\()?([\w.]+\.)?"
    r"(((local|global|world|ddp|ddp_local|dist)_)?rank|(local_)?process_index|get_(local_|node_local_)?rank\(\)"
    r"|(environ\[|getenv\(|get\()['\"](RANK|LOCAL_RANK|SLURM_PROCID)['\"][^()]*[\])])\)?",
    re.IGNORECASE,
)
_MAIN = re.compile(
    r"(is_)?(local_|world_|global_)?"
    r"(main|master|rank_?0|rank_?zero|global_zero|zero_rank)(_process|_rank)?",
    re.IGNORECASE,
)
_SIZE = r"world_size|num_processes|nprocs|world\.size"
_SEVERAL = re.compile(
    rf"distributed|ddp|is_initialized|is_available|multi_?gpu|{_SIZE}", re.IGNORECASE
)
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda rank, ranks: rank in ranks,
    ast.NotIn: lambda rank, ranks: rank not in ranks,
}
RANKS = frozenset(range(16))
"""The ranks of the run for which conditions are evaluated."""


def reaching(script: Script, tests: Iterable[Test]) -> frozenset[int]:
    """The ranks for which all tests hold or may hold."""
    ranks = RANKS
    for test in tests:
        ranks = frozenset(
            r for r in ranks if _truth(script, test.expression, r) is not (not test.value)
        )
    return ranks


def _truth(script: Script, node: ast.expr, rank: int, depth: int = 8) -> bool | None:
    """The value of a test on a rank of a run of several processes; None if it is not known."""
    match node:
        case ast.UnaryOp(ast.Not(), negated):
            truth = _truth(script, negated, rank, depth)
            return None if truth is None else not truth
        case ast.BoolOp(op, values):
            decisive = isinstance(op, ast.Or)
            truths = [_truth(script, value, rank, depth) for value in values]
            if decisive in truths:
                return decisive
            return None if None in truths else not decisive
        case ast.Compare(left, [comparison], [right]):
            return _compared(script, left, comparison, right, rank)
    meaning = script.definition(node) if depth else None
    if meaning is not None:
        return _truth(script, meaning, rank, depth - 1)
    is_call = isinstance(node, ast.Call)
    if is_rank(script, node):
        return None if is_call else rank != 0
    main = _MAIN.fullmatch(last_name(node))
    if main and (main[1] or not is_call):
        return rank == 0
    return True if _SEVERAL.search(script.text(node)) else None


def _compared(
    script: Script, left: ast.expr, comparison: ast.cmpop, right: ast.expr, rank: int
) -> bool | None:
    compare = _COMPARISONS.get(type(comparison))
    try:
        numbers = [_number(script, node, rank) for node in (left, right)]
    except (ValueError, TypeError):
        return None
    return compare(*numbers) if compare else None


def _number(script: Script, node: ast.expr, rank: int) -> int | list[int]:
    """The value of a rank, the number of ranks, a number or a tuple of numbers, also in quotes."""
    if is_rank(script, node):
        return rank
    if re.search(_SIZE, script.text(node), re.IGNORECASE):
        return len(RANKS)
    value = ast.literal_eval(node)
    return [int(v) for v in value] if isinstance(value, tuple | list | set) else int(value)


def is_rank(script: Script, node: ast.expr) -> bool:
    """Whether an expression is the number of a process. The rank in a group is not, nor a loop
    variable with the name of a rank.
    """
    name = dotted(node)
    for binding in script.lookup(name, node):
        if isinstance(binding.node, ast.For | ast.comprehension):
            return False
    return not name.endswith("group.rank") and _RANK.fullmatch(script.text(node)) is not None
