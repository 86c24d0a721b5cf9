"""Tests that hold on some ranks only: `rank == 0`, `dist.get_rank() != 0`, `is_main_process`."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.lint.conditions import Test, all_of, any_of
from lockstep.tools.lint.script import Script, dotted, last_name

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
    """The ranks for which `rank == number` is `inside`."""

    number: int
    inside: bool


def side(script: Script, test: Test) -> Side | None:
    """Which ranks pass; None for a test that does not depend on the rank, or that one process
    alone passes as well.
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
    """`not distributed`, `world_size == 1`."""
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
    """The ranks in `0`, `"0"` or `(0, -1)`. Older scripts say -1 where nothing is distributed."""
    try:
        given = ast.literal_eval(text)
        several = given if isinstance(given, (tuple, list, set)) else [given]
        return {int(each) for each in several} - {-1}
    except (ValueError, TypeError, SyntaxError):
        return set()


def is_rank(script: Script, node: cst.BaseExpression) -> bool:
    """Is this the number of a rank among all? Not the rank in a group, nor a loop's counter of
    that name.
    """
    bound = [each.node for each in script.lookup(dotted(node), node)]
    counts = any(isinstance(each, (cst.For, cst.CompFor)) for each in bound)
    other = counts or dotted(node).endswith("group.rank")
    return not other and _RANK.fullmatch(script.text(node)) is not None
