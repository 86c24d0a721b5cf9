"""Find the conditions under which a line runs. Two kinds are understood: tests of a counter's
remainder, and tests that hold on some ranks only, such as `rank == 0` or `is_main_process`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.lint.script import Binding, Loop, Script, Value, dotted, last_name


@dataclass(frozen=True, slots=True)
class Test:
    """An expression and the truth value that it must have."""

    expression: cst.BaseExpression
    value: bool


def conditions(script: Script, node: cst.CSTNode) -> Iterator[Test]:
    """Yield the tests of `if`, `x if c else y`, `c and x` around `node`, the innermost first. All
    of them hold at `node`.
    """
    for above, below in script.ancestors(node):
        match above:
            case cst.If() | cst.IfExp() if below is not above.test:
                yield Test(above.test, below is above.body)
            case cst.BooleanOperation() if below is above.right:
                yield Test(above.left, isinstance(above.operator, cst.And))


def any_of(script: Script, test: Test) -> list[Test]:
    """Split `test` into tests of which at least one holds if and only if `test` holds."""
    return _parts(script, test, cst.Or)


def all_of(script: Script, test: Test) -> list[Test]:
    """Split `test` into tests that all hold if and only if `test` holds."""
    return _parts(script, test, cst.And)


_Joined = type[cst.BaseBooleanOp]


def _parts(script: Script, test: Test, joined: _Joined, depth: int = 8) -> list[Test]:
    tests = [test]
    match test.expression:
        case cst.UnaryOperation(operator=cst.Not(), expression=negated):
            tests = [Test(negated, not test.value)]
        case cst.BooleanOperation(left=left, right=right, operator=operator):
            if isinstance(operator, joined) == test.value:  # not (a and b) is not a or not b
                tests = [Test(left, test.value), Test(right, test.value)]
        case expression if depth and (meaning := definition(script, expression)) is not None:
            tests = [Test(meaning, test.value)]
    if tests == [test]:
        return tests
    return [part for each in tests for part in _parts(script, each, joined, depth - 1)]


def definition(script: Script, node: cst.BaseExpression) -> Value:
    """Return the value of a name, or None if it is not certain. It is certain if the name is bound
    once in its function, or once in the innermost loop, and before `node`.
    """
    name = dotted(node)
    found = script.lookup(name, node)
    if name.startswith("self."):
        found = [each for each in found if script.scope(each.node) is script.scope(node)]
    if len(found) > 1 and (loops := script.loops(node)):
        found = [each for each in found if script.inside(each.node, loops[0])]
    if len(found) != 1 or isinstance(found[0].node, cst.WithItem):
        return None
    return found[0].value if script.before(found[0].node, node) else None


_MODULO = re.compile(
    r"(?:0(?P<flipped>[=!]=))?"
    r"\(?(?P<counter>[A-Za-z_][\w.]*)(?P<offset>[+-]\d+)?\)?%(?P<size>[\w.]+)"
    r"(?:(?P<sign>[=!]=|[<>])\(?(?P<value>[\w.]+(?:-1)?)\)?)?"
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
    found = _MODULO.fullmatch(script.text(test.expression).replace(" ", ""))
    if found is None:
        return None
    size, value = found["size"], found["value"] or "0"
    last = str(int(size) - 1) if size.isdigit() else f"{size}-1"
    sign = found["flipped"] or found["sign"] or "!="
    unequal = ("!=", ">") if value == "0" else ("!=", "<")
    if value not in ("0", last) or sign not in ("==", *unequal):
        return None
    residue = (0 if value == "0" else -1) - int(found["offset"] or 0)
    return Modulo(found["counter"], size, residue, (sign == "==") == test.value)


def only_modulo(script: Script, tests: list[Test]) -> tuple[Modulo, list[Test]] | None:
    """The one test of a remainder among `tests`, and the others."""
    found = {test: window for test in tests if (window := modulo(script, test)) is not None}
    others = [test for test in tests if test not in found]
    return (next(iter(found.values())), others) if len(found) == 1 else None


def counting_loop(script: Script, counter: str, node: cst.CSTNode) -> Loop | None:
    """The innermost loop around `node` that gives the counter its values."""
    bound = [each.node for each in script.lookup(counter, node)]
    for loop in script.loops(node):
        if any(script.inside(each, loop) for each in bound):
            return loop
    return None


def first_value(script: Script, counter: str, loop: Loop, node: cst.CSTNode) -> int | None:
    """Return the counter's value at `node` in the loop's first iteration; None if unknown."""
    bound = script.lookup(counter, node)
    within = [each for each in bound if script.inside(each.node, loop)]
    before = [each for each in bound if script.before(each.node, loop)]
    if len(within) == 1 and within[0].node is loop:
        return _first_counted(script, loop, counter)
    if len(within) != 1 or len(before) != 1 or not _adds_one(script, within[0], loop):
        return None
    start = _integer(script, before[0].value)
    return None if start is None else start + script.before(within[0].node, node)


def _adds_one(script: Script, bound: Binding, loop: Loop) -> bool:
    above = [above for above, _ in script.ancestors(bound.node)]
    always = loop in above[:3]  # a line, a block, the loop
    return always and script.text(bound.node).replace(" ", "").endswith("+=1")


def _first_counted(script: Script, loop: Loop, counter: str) -> int | None:
    counted = counted_call(loop)
    given = [arg.value for arg in counted.args] if counted is not None else []
    if counted is None or len(given) > 2:
        return None
    if last_name(counted) == "range":
        return _integer(script, given[0]) if len(given) == 2 else 0
    if not isinstance(loop, cst.For) or not script.text(loop.target).startswith(f"{counter},"):
        return None
    return _integer(script, given[1]) if len(given) == 2 else 0


def _integer(script: Script, node: Value) -> int | None:
    text = script.text(node)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def counted_call(loop: Loop) -> cst.Call | None:
    """Return the enumerate(...) or range(...) of a loop, also if a progress bar wraps it:
    `tqdm(enumerate(x), ...)`.
    """
    node = loop.iter if isinstance(loop, cst.For) else None
    while isinstance(node, cst.Call) and node.args:
        if last_name(node) in ("enumerate", "range"):
            return node
        node = node.args[0].value if re.search(r"(tqdm|track|trange)$", last_name(node)) else None
    return None


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
_ALONE = re.compile(
    r"distributed|ddp|world_size|is_initialized|is_available|multi_?gpu|num_processes|nprocs|world\.size",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Side:
    """The rank `number` if `inside` is true; otherwise all ranks but this one."""

    number: int
    inside: bool


def side(script: Script, test: Test) -> Side | None:
    """Return the ranks that pass a test. None if it does not depend on the rank, or if only a run
    of one process passes it.
    """
    parts = all_of(script, test)
    found = [each for part in parts if (each := _single(script, part)) is not None]
    if found:
        return None if any(_means_alone(script, part) for part in parts) else found[0]
    parts = any_of(script, test)  # rank == 0 or not distributed
    found = [each for part in parts if (each := _single(script, part)) is not None]
    alone = [part for part in parts if _means_alone(script, part)]
    return found[0] if len(found) == 1 and len(alone) == len(parts) - 1 else None


def _means_alone(script: Script, part: Test) -> bool:
    """Whether a test says that only one process runs: `not distributed`, `world_size == 1`."""
    text = script.text(part.expression)
    if not _ALONE.search(text) or _single(script, part) is not None:
        return False
    if isinstance(part.expression, cst.Comparison):
        return re.search(r"(==|<=) ?1$" if part.value else r"(>|!=) ?1$", text) is not None
    return not part.value


def _single(script: Script, part: Test) -> Side | None:
    match part.expression:
        case cst.Comparison(left=left, comparisons=[target]):
            sign, right = target.operator, target.comparator
            flipped = is_rank(script, right)
            numbers = _numbers(script.text(left if flipped else right))
            known = flipped or is_rank(script, left)
            return _compared(script.text(sign), numbers, part.value) if known else None
        case expression if is_rank(script, expression) and not isinstance(expression, cst.Call):
            return Side(0, not part.value)
        case expression if main := _MAIN.fullmatch(last_name(expression)):
            return Side(0, part.value) if main[1] or not isinstance(expression, cst.Call) else None
    return None


def _compared(sign: str, numbers: set[int], value: bool) -> Side | None:
    if len(numbers) != 1:
        return None
    number = numbers.pop()
    match sign, number:
        case (("==" | "in"), _):
            return Side(number, value)
        case (("!=" | "not in"), _):
            return Side(number, not value)
        case (">", 0) | ("<", 1):
            return Side(0, value == (sign == "<"))
    return None


def _numbers(text: str) -> set[int]:
    """Return the ranks in `0`, `"0"` or `(0, -1)`, without -1, which in older scripts means that
    the run is not distributed.
    """
    try:
        given = ast.literal_eval(text)
        several = given if isinstance(given, (tuple, list, set)) else [given]
        return {int(each) for each in several} - {-1}
    except (ValueError, TypeError, SyntaxError):
        return set()


def is_rank(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is the number of a process. The rank in a group is not, nor a loop
    variable with the name of a rank.
    """
    bound = [each.node for each in script.lookup(dotted(node), node)]
    counts = any(isinstance(each, (cst.For, cst.CompFor)) for each in bound)
    other = counts or dotted(node).endswith("group.rank")
    return not other and _RANK.fullmatch(script.text(node)) is not None
