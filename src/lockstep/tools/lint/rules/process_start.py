"""Rules for the start of a process: seed, port, timeout, device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from lockstep.tools.lint.conditions import conditions, is_rank
from lockstep.tools.lint.script import Problem, Script, Value, argument, dotted, last_name

_SEEDS = re.compile(r"torch\.((random|cuda)\.)?manual_seed(_all)?")
_SENDS_WEIGHTS = re.compile(
    r"DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|broadcast\w*|prepare|Stepper"
)
_GLOBAL_RANK = re.compile(r"([\w.]+\.)?((global_|world_|dist_|ddp_)?rank|get_rank\(\))")
_NUMBER = re.compile(r"(str\()?['\"]?[1-9]\d*['\"]?\)?")
_URL = re.compile(r"['\"]tcp://[^{}]*:([1-9]\d*)['\"]")


def seed_plus_rank(script: Script) -> Iterator[Problem]:
    calls = script.all(cst.Call)
    if any(_SENDS_WEIGHTS.fullmatch(last_name(call)) for call in calls):
        return
    for call in calls:
        if not _SEEDS.fullmatch(script.name(call.func)):
            continue
        seed = argument(call, "seed", 0)
        match seed:
            case cst.BinaryOperation(left, cst.Add(), right):
                if is_rank(script, left) or is_rank(script, right):
                    yield Problem(call, {"seed": script.text(seed)})


def fixed_port(script: Script) -> Iterator[Problem]:
    for node, value in _set_variables(script, "MASTER_PORT"):
        port = script.text(value)
        if isinstance(node, cst.Call) or not _NUMBER.fullmatch(port):
            continue
        guards = conditions(script, node)
        if any("MASTER_PORT" in script.text(guard.expression) for guard in guards):
            continue
        call = f'os.environ.setdefault("MASTER_PORT", {port})'
        fix = cst.Expr(cst.parse_expression(call))
        yield Problem(node, {"what": "MASTER_PORT", "port": port}, fix)
    for call_node in script.all(cst.Call):
        url = script.text(argument(call_node, "init_method", 1))
        if match := _URL.fullmatch(url):
            yield Problem(call_node, {"what": "the port of init_method", "port": match[1]})


def nccl_timeout(script: Script) -> Iterator[Problem]:
    for node, value in _set_variables(script, "NCCL_TIMEOUT"):
        yield Problem(node, {"value": script.text(value)})


def _set_variables(script: Script, name: str) -> Iterator[tuple[cst.CSTNode, Value]]:
    """`os.environ[name] = value` and `os.environ.setdefault(name, value)`, with the value."""
    quoted = rf"['\"]{name}['\"]"
    item = rf"(os\.)?environ\[{quoted}\]"
    for assigned in script.all(cst.Assign):
        target = assigned.targets[0].target
        if re.fullmatch(item, script.text(target)):
            yield assigned, assigned.value
    for call in script.all(cst.Call):
        key = script.text(argument(call, "key", 0))
        if last_name(call) == "setdefault" and re.fullmatch(quoted, key):
            yield call, argument(call, "value", 1)


def device_from_rank(script: Script) -> Iterator[Problem]:
    for device in _devices(script):
        rank = script.text(device)
        if device is None or not _GLOBAL_RANK.fullmatch(rank) or not is_rank(script, device):
            continue
        bindings = script.lookup(dotted(device), device)
        values = " ".join(script.text(binding.value) for binding in bindings)
        if not re.search(r"local|%", values, re.IGNORECASE):
            fix = cst.Name("local_rank") if script.lookup("local_rank", device) else None
            yield Problem(device, {"rank": rank}, fix)


def _devices(script: Script) -> Iterator[Value]:
    """Yield the expressions that select a device."""
    for call in script.all(cst.Call):
        match call.func:
            case cst.Attribute(attr=cst.Name("to" | "cuda" | "set_device")):
                yield argument(call, "device", 0)
            case cst.Attribute(attr=cst.Name("device")):
                yield argument(call, "index", 1)
        yield argument(call, "output_device")
        match argument(call, "device_ids"):
            case cst.List(elements=[cst.Element(value=device)]):
                yield device
    for text in script.all(cst.FormattedString):
        match text.parts:
            case [cst.FormattedStringText("cuda:"), cst.FormattedStringExpression(device)]:
                yield device
