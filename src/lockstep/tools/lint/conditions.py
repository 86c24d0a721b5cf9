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
    parts = _halves(test, joined)
    if not parts and depth:
        meaning = definition(script, test.expression)
        if meaning is not None:
            parts = [Test(meaning, test.value)]
    if not parts:
        return [test]
    tests: list[Test] = []
    for part in parts:
        tests += _parts(script, part, joined, depth - 1)
    return tests


def _halves(test: Test, joined: _Joined) -> list[Test]:
    """Return the tests that `test` consists of, without `not`; none if it has no such parts."""
    match test.expression:
        case cst.UnaryOperation(operator=cst.Not(), expression=negated):
            return [Test(negated, not test.value)]
        case cst.BooleanOperation(left=left, right=right, operator=operator):
            if isinstance(operator, joined) == test.value:  # not (a and b) is not a or not b
                return [Test(left, test.value), Test(right, test.value)]
    return []


def definition(script: Script, node: cst.BaseExpression) -> Value:
    """Return the value of a name, or None if it is not certain. It is certain if the name is bound
    once in its function, or once in the innermost loop, and before `node`.
    """
    name = dotted(node)
    bindings = script.lookup(name, node)
    if name.startswith("self."):
        scope = script.scope(node)
        bindings = [binding for binding in bindings if script.scope(binding.node) is scope]
    loops = script.loops(node)
    if len(bindings) > 1 and loops:
        bindings = [binding for binding in bindings if script.inside(binding.node, loops[0])]
    if len(bindings) != 1:
        return None
    binding = bindings[0]
    if isinstance(binding.node, cst.WithItem) or not script.before(binding.node, node):
        return None
    return binding.value


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
    match = _MODULO.fullmatch(script.text(test.expression).replace(" ", ""))
    if match is None:
        return None
    size = match["size"]
    value = match["value"] or "0"
    sign = match["flipped"] or match["sign"] or "!="
    last = str(int(size) - 1) if size.isdigit() else f"{size}-1"
    if value == "0":
        residue = 0
        unequal = ("!=", ">")
    elif value == last:
        residue = -1
        unequal = ("!=", "<")
    else:
        return None
    if sign != "==" and sign not in unequal:
        return None
    residue -= int(match["offset"] or 0)
    return Modulo(match["counter"], size, residue, (sign == "==") == test.value)


def only_modulo(script: Script, tests: list[Test]) -> tuple[Modulo, list[Test]] | None:
    """The one test of a remainder among `tests`, and the others."""
    remainders = set()
    others = []
    for test in tests:
        remainder = modulo(script, test)
        if remainder is None:
            others.append(test)
        else:
            remainders.add((test, remainder))
    if len(remainders) != 1:
        return None
    _, remainder = remainders.pop()
    return remainder, others


def counting_loop(script: Script, counter: str, node: cst.CSTNode) -> Loop | None:
    """The innermost loop around `node` that gives the counter its values."""
    bindings = script.lookup(counter, node)
    for loop in script.loops(node):
        if any(script.inside(binding.node, loop) for binding in bindings):
            return loop
    return None


def first_value(script: Script, counter: str, loop: Loop, node: cst.CSTNode) -> int | None:
    """Return the counter's value at `node` in the loop's first iteration; None if unknown."""
    bindings = script.lookup(counter, node)
    within = [binding for binding in bindings if script.inside(binding.node, loop)]
    before = [binding for binding in bindings if script.before(binding.node, loop)]
    if len(within) != 1:
        return None
    if within[0].node is loop:
        return _first_counted(script, loop, counter)
    if len(before) != 1 or not _adds_one(script, within[0], loop):
        return None
    start = _integer(script, before[0].value)
    return None if start is None else start + script.before(within[0].node, node)


def _adds_one(script: Script, binding: Binding, loop: Loop) -> bool:
    above = [above for above, _ in script.ancestors(binding.node)]
    always = loop in above[:3]  # a line, a block, the loop
    return always and script.text(binding.node).replace(" ", "").endswith("+=1")


def _first_counted(script: Script, loop: Loop, counter: str) -> int | None:
    call = counted_call(loop)
    if call is None or len(call.args) > 2:
        return None
    arguments = [argument.value for argument in call.args]
    if last_name(call) == "range":
        return _integer(script, arguments[0]) if len(arguments) == 2 else 0
    if not isinstance(loop, cst.For) or not script.text(loop.target).startswith(f"{counter},"):
        return None
    return _integer(script, arguments[1]) if len(arguments) == 2 else 0


def _integer(script: Script, node: Value) -> int | None:
    text = script.text(node)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def counted_call(loop: Loop) -> cst.Call | None:
    """Return the enumerate(...) or range(...) of a loop, also if a progress bar wraps it:
    `tqdm(enumerate(x), ...)`.
    """
    node = loop.iter if isinstance(loop, cst.For) else None
    while isinstance(node, cst.Call) and node.args:
        name = last_name(node)
        if name in ("enumerate", "range"):
            return node
        if not re.search(r"(tqdm|track|trange)$", name):
            return None
        node = node.args[0].value
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
    sides = _sides(script, parts)
    if sides:
        return None if any(_means_alone(script, part) for part in parts) else sides[0]
    parts = any_of(script, test)  # rank == 0 or not distributed
    sides = _sides(script, parts)
    alone = [part for part in parts if _means_alone(script, part)]
    return sides[0] if len(sides) == 1 and len(alone) == len(parts) - 1 else None


def _sides(script: Script, parts: list[Test]) -> list[Side]:
    singles = [_single(script, part) for part in parts]
    return [single for single in singles if single is not None]


def _means_alone(script: Script, part: Test) -> bool:
    """Whether a test says that only one process runs: `not distributed`, `world_size == 1`."""
    text = script.text(part.expression)
    if not _ALONE.search(text) or _single(script, part) is not None:
        return False
    if isinstance(part.expression, cst.Comparison):
        return re.search(r"(==|<=) ?1$" if part.value else r"(>|!=) ?1$", text) is not None
    return not part.value


def _single(script: Script, part: Test) -> Side | None:
    expression = part.expression
    if isinstance(expression, cst.Comparison):
        return _compared(script, expression, part.value)
    is_call = isinstance(expression, cst.Call)
    if is_rank(script, expression):
        return None if is_call else Side(0, not part.value)
    main = _MAIN.fullmatch(last_name(expression))
    if main is None or (is_call and not main[1]):
        return None
    return Side(0, part.value)


def _compared(script: Script, comparison: cst.Comparison, value: bool) -> Side | None:
    """Return the ranks for which the comparison of a rank with a number has this value."""
    if len(comparison.comparisons) != 1:
        return None
    target = comparison.comparisons[0]
    left, right = comparison.left, target.comparator
    if is_rank(script, right):
        left, right = right, left
    if not is_rank(script, left):
        return None
    numbers = _numbers(script.text(right))
    if len(numbers) != 1:
        return None
    number = numbers.pop()
    sign = script.text(target.operator)
    if sign in ("==", "in"):
        return Side(number, value)
    if sign in ("!=", "not in"):
        return Side(number, not value)
    if (sign, number) == (">", 0):
        return Side(0, not value)
    return Side(0, value) if (sign, number) == ("<", 1) else None


def _numbers(text: str) -> set[int]:
    """Return the ranks in `0`, `"0"` or `(0, -1)`, without -1, which in older scripts means that
    the run is not distributed.
    """
    try:
        value = ast.literal_eval(text)
        several = value if isinstance(value, (tuple, list, set)) else [value]
        return set(map(int, several)) - {-1}
    except (ValueError, TypeError, SyntaxError):
        return set()


def is_rank(script: Script, node: cst.BaseExpression) -> bool:
    """Whether an expression is the number of a process. The rank in a group is not, nor a loop
    variable with the name of a rank.
    """
    name = dotted(node)
    for binding in script.lookup(name, node):
        if isinstance(binding.node, (cst.For, cst.CompFor)):
            return False
    return not name.endswith("group.rank") and _RANK.fullmatch(script.text(node)) is not None
