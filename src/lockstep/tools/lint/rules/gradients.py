"""Rules for gradients that only some ranks reduce, that are clipped before they are complete, that
are never averaged, or that bypass the wrapper; and for losses whose scale depends on the number of
ranks, or that are reported as more than they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain

from lockstep.tools.lint.conditions import Test, conditions, split
from lockstep.tools.lint.script import (
    Loop,
    Problem,
    Script,
    Value,
    With,
    argument,
    arguments,
    dotted,
    last_name,
    of_epochs,
)
from lockstep.tools.lint.torch_names import (
    alternatives,
    collective,
    is_lockstep_wrapper,
    reduces_gradient,
    without_gradients,
    wrapper,
)

_CLIPS = re.compile(r"clip_grad_norm_?|clip_grad_value_?|clip_gradients|clip_grads_with_norm_")
_BY_HAND = re.compile(r"reduce|average|sync_grad", re.IGNORECASE)
_REDUCES = re.compile(r"reduce|average|sync(?!hronize$)(?<!no_sync)", re.IGNORECASE)
_OF_GRADIENTS = re.compile(r"(reduce|average|sync|mean)\w*grad|requires_grad|toggle", re.IGNORECASE)
_HELD_BACK = re.compile(r"\.no_(backward_)?sync\b(?!.*enabled=False)")
_MEAN_LOSS = re.compile(r"cross_entropy|\w+_loss|\w+Loss|mean")
_SCALES = re.compile(r"(true_)?(div|mul|divide|multiply)_?|_foreach_\w+")
_REPORTS = re.compile(r"(.+\.)?(print|info|add_scalar|log_metrics?)|(wandb|self|\w*run)\.log")
_COLLECTS = ("append", "extend", "update", "add")
_OF_LAST_BATCH = re.compile(r"last|final|batch|step|iter", re.IGNORECASE)
_OF_RANKS = re.compile(r"world|rank|grad|worker|replica|nproc", re.IGNORECASE)


def gradient_conditional_collective(script: Script) -> Iterator[Problem]:
    for call in script.all(ast.Call):
        name = collective(script, call)
        if name and any(_has_gradient(script, test) for test in _tests(script, call)):
            yield Problem(call, {"what": name})


def _tests(script: Script, call: ast.Call) -> Iterator[Test]:
    """Yield the tests that hold at a call: its conditions, and those of an earlier
    `if ...: continue` in the loop.
    """
    for test in conditions(script, call):
        yield from split(script, test, ast.And)
    for loop in script.loops(call)[:1]:
        for node in script.within(loop, ast.If):
            if script.before(node, call) and any(script.within(node.body, ast.Continue)):
                yield Test(node.test, False)


def _has_gradient(script: Script, test: Test) -> bool:
    expected = r"[\w.]+\.grad is not None" if test.value else r"[\w.]+\.grad is None"
    return re.fullmatch(expected, script.text(test.expression)) is not None


def sum_loss(script: Script) -> Iterator[Problem]:
    modules = " ".join(chain(*script.imports.values()))
    if not re.search(r"\btorch\.(distributed|nn\.parallel)", modules):
        return
    for call, loss in _losses(script):
        is_sum = isinstance(loss, ast.Call) and last_name(loss) == "sum" and not loss.args
        if loss and is_sum and script.calls(script.scope(call), "step"):
            yield Problem(loss, {})


def _losses(script: Script) -> Iterator[tuple[ast.Call, Value]]:
    """Yield each `loss.backward()`, with the value of its loss."""
    for call in script.all(ast.Call):
        match call:
            case ast.Call(ast.Attribute(loss, "backward"), []):
                value: Value = loss
                for binding in script.lookup(dotted(loss), call):
                    if script.before(binding.node, call):
                        value = binding.value
                yield call, value


def last_batch_loss(script: Script) -> Iterator[Problem]:
    modules = " ".join(chain(*script.imports.values()))
    if not re.search(r"\b(torch\.(distributed|nn\.parallel)|lockstep)\b", modules):
        return
    for backward, _ in _losses(script):
        loss = dotted(backward.func).removesuffix(".backward")
        loops = script.loops(backward)
        if loss and len(loops) > 1 and of_epochs(loops[1]) and script.calls(loops[0], "step"):
            for call in _reports(script, loops[0], loss):
                yield Problem(call, {"loss": loss})


def _reports(script: Script, batches: Loop, loss: str) -> Iterator[ast.Call]:
    """Yield the calls after the loop over the batches that report a value of its last batch, if
    the loop does not collect the losses.
    """
    values = {loss}
    for call in script.calls(batches, "item", "detach", "float"):
        if loss in script.names(call):
            values.add(script.assigned(call))
    if _collects(script, batches, values):
        return
    for call in script.calls(script.scope(batches)):
        if not _REPORTS.fullmatch(dotted(call.func)) or script.inside(call, batches):
            continue
        if not script.before(batches, call) or _OF_LAST_BATCH.search(script.text(call)):
            continue
        for value in values & script.names(call):
            bindings = script.lookup(value, call)
            if all(script.inside(binding.node, batches) for binding in bindings):
                yield call


def _collects(script: Script, batches: Loop, values: set[str]) -> bool:
    """Whether the loop adds up one of the values, or appends it."""
    for call in script.calls(batches, *_COLLECTS):
        if values & script.names(call):
            return True
    for added in script.within(batches, ast.AugAssign):
        if values & script.names(added.value):
            return True
    for assigned in script.within(batches, ast.Assign):
        target = script.text(assigned.targets[0])
        if values & script.names(assigned.value) and target in script.text(assigned.value):
            return True
    return False


def undivided_sum(script: Script) -> Iterator[Problem]:
    called = {last_name(call) for call in script.all(ast.Call)}
    if "step" not in called or not any(map(_MEAN_LOSS.fullmatch, called)):
        return
    losses = list(_losses(script))
    if not losses or any("sum" in script.text(loss) for _, loss in losses):
        return
    for call in script.all(ast.Call):
        if not reduces_gradient(script, call):
            continue
        op = script.text(argument(call, "op", 1))
        scopes = {script.scope(node) for node in (call, *(backward for backward, _ in losses))}
        if re.fullmatch(r"|(.*\.)?SUM|'sum'", op) and not _divides(script, scopes):
            yield Problem(call, {})


def _divides(script: Script, scopes: set[ast.AST]) -> bool:
    """Whether the file may divide gradients, the loss or the learning rate by the number of
    ranks: any division in these functions, and one that names ranks or gradients elsewhere.
    """
    for node in script.nodes:
        match node:
            case ast.BinOp(_, ast.Div(), divisor) | ast.AugAssign(_, ast.Div(), divisor):
                is_other = re.search(r"\blen\(|^[\d.]+$", script.text(divisor))
            case ast.Call() if _SCALES.fullmatch(last_name(node)):
                is_other = None
            case _:
                continue
        if _OF_RANKS.search(script.text(node)) or (not is_other and script.scope(node) in scopes):
            return True
    return False


def clip_inside_no_sync(script: Script) -> Iterator[Problem]:
    for call in script.all(ast.Call):
        name = last_name(call)
        if not _CLIPS.fullmatch(name):
            continue
        blocks = [above for above, _ in script.ancestors(call) if isinstance(above, With)]
        if any(_holds_for(script, block, call) for block in blocks):
            yield Problem(call, {"name": name, "where": "inside no_sync()"})
        elif _reduced_later(script, call):
            yield Problem(call, {"name": name, "where": "before the gradients are reduced"})


def _holds_for(script: Script, block: With, call: ast.Call) -> bool:
    """Whether the block skips the exchange of gradients whenever it clips."""
    contexts = [item.context_expr for item in block.items]
    contexts = [context for context in contexts if _holds_back(script, context)]
    if not contexts:
        return False
    for other in script.calls(block):
        if script.before(other, call) and _BY_HAND.search(last_name(other)):
            return False
    if all(last_name(context) == "no_sync" for context in contexts):
        return True
    return not any(script.inside(test.expression, block) for test in conditions(script, call))


def _holds_back(script: Script, expression: ast.expr) -> bool:
    """Whether an expression is `model.no_sync()`, a conditional with it as a branch, or a name
    that is bound to either.
    """
    name = expression.func if isinstance(expression, ast.Call) else expression
    bindings = script.lookup(name.id, name) if isinstance(name, ast.Name) else []
    texts = [script.text(node) for node in (expression, *(b.value for b in bindings))]
    return any(_HELD_BACK.search(text) for text in texts)


def _reduced_later(script: Script, clip: ast.Call) -> bool:
    """Whether the iteration runs a backward before `clip` and reduces gradients by hand after."""
    choices = {test.expression: test.value for test in conditions(script, clip)}
    for loop in script.loops(clip)[:1]:
        if not any(script.before(backward, clip) for backward in script.calls(loop, "backward")):
            return False
        for call in script.calls(loop):
            if not script.before(clip, call) or not _reduces(script, call):
                continue
            tests = conditions(script, call)
            if all(choices.get(test.expression, test.value) == test.value for test in tests):
                return True
    return False


def _reduces(script: Script, call: ast.Call) -> bool:
    """Whether a call is `all_reduce(p.grad)`, or calls a function of this file that does it."""
    function = script.called(call)
    inner = script.calls(function, "all_reduce") if function is not None else []
    return reduces_gradient(script, call) or any(_reduces(script, below) for below in inner)


def forward_through_module(script: Script) -> Iterator[Problem]:
    for call in script.all(ast.Call):
        module = call.func
        if isinstance(module, ast.Attribute) and module.attr == "forward":
            module = module.value
        if not isinstance(module, ast.Attribute) or module.attr != "module":
            continue
        name = dotted(module.value)
        if _is_torch_wrapper(script, module.value, call) and _trains(script, call, name):
            yield Problem(call.func, {"name": name}, name)


def _is_torch_wrapper(script: Script, node: ast.expr, use: ast.expr) -> bool:
    """Whether a name at `use` is certainly torch's DistributedDataParallel."""
    for binding in script.lookup(dotted(node), use):
        if any(is_lockstep_wrapper(script, call) for call in alternatives(binding.value)):
            return False
    return wrapper(script, node, use) is not None


def _trains(script: Script, node: ast.Call, name: str) -> bool:
    """Whether a forward of `.module` leads to a backward that nothing reduces. False without
    gradients, in eval mode, if detached, or if the script reduces gradients itself.
    """
    around = script.calls(script.scope(node))
    if without_gradients(script, node) or last_name(script.parents[node]) == "detach":
        return False
    if not script.calls(script.scope(node), "backward"):
        return False
    for call in around:
        # the wrapper's forward prepares the reduction, or the backward is of another model
        forward = _is_torch_wrapper(script, call.func, call) and not without_gradients(script, call)
        if forward or _by_hand(script, call, name):
            return False
    modes = re.compile(rf"{re.escape(name)}(\.module)?\.(train|eval)")
    before = [dotted(call.func) for call in around if script.before(call, node)]
    modes_before = [called for called in before if modes.fullmatch(called)]
    return not modes_before or modes_before[-1].endswith("train")


def _by_hand(script: Script, call: ast.Call, name: str) -> bool:
    """Whether a call reduces or disables gradients by hand, as far as its name, its arguments or a
    `.grad` in the same function tell.
    """
    called = last_name(call)
    if not _REDUCES.search(called):
        return _OF_GRADIENTS.search(called) is not None
    texts = [script.text(value) for value in arguments(call).values()]
    if any(text == name or "param" in text for text in texts):
        return True
    attributes = script.within(script.scope(call), ast.Attribute)
    return any(node.attr == "grad" for node in attributes)
