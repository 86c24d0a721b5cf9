"""Gradients that only some ranks reduce, and losses whose scale depends on the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from lockstep.tools.lint.conditions import Test, all_of, conditions
from lockstep.tools.lint.distributed import collective
from lockstep.tools.lint.script import Problem, Script, dotted, last_name


def gradient_conditional_collective(script: Script) -> Iterator[Problem]:
    for call in script.all(cst.Call):
        what = collective(script, call)
        if what and any(_has_gradient(script, test) for test in _tests(script, call)):
            wrong = (
                f"{what}() is skipped where this rank has no gradient, while another may have one"
            )
            advice = "set a missing gradient to torch.zeros_like(p), and reduce every parameter"
            yield Problem(call, f"{wrong}: they hang or pair different parameters", advice)


def _tests(script: Script, call: cst.Call) -> Iterator[Test]:
    """What holds at a call, by a condition or by `if ...: continue` earlier in the loop."""
    for test in conditions(script, call):
        yield from all_of(script, test)
    for loop in script.loops(call)[:1]:
        for node in script.within(loop, cst.If):
            if script.before(node, call) and any(script.within(node.body, cst.Continue)):
                yield Test(node.test, False)


def _has_gradient(script: Script, test: Test) -> bool:
    wanted = r"[\w.]+\.grad is not None" if test.value else r"[\w.]+\.grad is None"
    return re.fullmatch(wanted, script.text(test.expression)) is not None


def sum_loss(script: Script) -> Iterator[Problem]:
    homes = " ".join(home for homes in script.imports.values() for home in homes)
    if not re.search(r"\btorch\.(distributed|nn\.parallel)", homes):
        return
    for call in script.all(cst.Call):
        match call:
            case cst.Call(func=cst.Attribute(value=loss, attr=cst.Name("backward")), args=[]):
                bound = script.lookup(dotted(loss), call)
                before = [each.value for each in bound if script.before(each.node, call)]
                value = before[-1] if before else loss
            case _:
                continue
        sums = isinstance(value, cst.Call) and last_name(value) == "sum" and not value.args
        if value is not None and sums and script.calls(script.scope(call), "step"):
            wrong = (
                "ranks average gradients, so the scale of this sum depends on the batch of one rank"
            )
            advice = "use .mean(), or divide by the number of samples in the global batch"
            yield Problem(value, wrong, advice)
