"""Rules for the start of a process: seed, port, timeout, device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.tools.lint.conditions import conditions, is_rank
from lockstep.tools.lint.script import Problem, Script, Value, argument, dotted, last_name
from lockstep.tools.lint.torch_names import collective

_SEEDS = re.compile(r"torch\.((random|cuda)\.)?manual_seed(_all)?")
_SENDS_WEIGHTS = re.compile(
    r"DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|fully_shard|broadcast\w*|prepare|Stepper"
)
_GLOBAL_RANK = re.compile(r"([\w.]+\.)?((global_|world_|dist_|ddp_)?rank|get_rank\(\))")
_NUMBER = re.compile(r"(str\()?['\"]?[1-9]\d*['\"]?\)?")
_URL = re.compile(r"['\"]tcp://[^{}]*:([1-9]\d*)['\"]")
_SELECTS_DEVICE = re.compile(
    r"set_device|cuda:|CUDA_VISIBLE_DEVICES|device_id=|local_rank|LOCAL_RANK|Accelerator|Fabric"
)


def seed_plus_rank(script: Script) -> Iterator[Problem]:
    called = {last_name(call) for call in script.all(ast.Call)}
    if any(map(_SENDS_WEIGHTS.fullmatch, called)):
        return
    for call in script.all(ast.Call):
        seed = argument(call, "seed", 0)
        if seed is None or not _SEEDS.fullmatch(script.name(call.func)):
            continue
        parts = [seed] if "backward" in called else []
        if isinstance(seed, ast.BinOp) and isinstance(seed.op, ast.Add):
            parts = [seed.left, seed.right]
        if any(is_rank(script, part) for part in parts):
            yield Problem(call, {"seed": script.text(seed)})


def fixed_port(script: Script) -> Iterator[Problem]:
    for node, value in _set_variables(script, "MASTER_PORT"):
        port = ast.get_source_segment(script.source, value) or ""
        if isinstance(node, ast.Call) or not _NUMBER.fullmatch(port):
            continue
        guards = conditions(script, node)
        if any("MASTER_PORT" in script.text(guard.expression) for guard in guards):
            continue
        fix = f'os.environ.setdefault("MASTER_PORT", {port})'
        yield Problem(node, {"what": "MASTER_PORT", "port": port}, fix)
    for call in script.all(ast.Call):
        url = script.text(argument(call, "init_method", 1))
        if match := _URL.fullmatch(url):
            yield Problem(call, {"what": "the port of init_method", "port": match[1]})


def nccl_timeout(script: Script) -> Iterator[Problem]:
    for node, value in _set_variables(script, "NCCL_TIMEOUT"):
        yield Problem(node, {"value": script.text(value)})


def _set_variables(script: Script, name: str) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr]]:
    """`os.environ[name] = value` and `os.environ.setdefault(name, value)`, with the value."""
    for node in script.nodes:
        match node:
            case ast.Assign([ast.Subscript(environment, ast.Constant(key))], value):
                if key == name and dotted(environment) in ("environ", "os.environ"):
                    yield node, value
            case ast.Call(ast.Attribute(_, "setdefault"), [ast.Constant(key), value]):
                if key == name:
                    yield node, value


def device_from_rank(script: Script) -> Iterator[Problem]:
    for device in _devices(script):
        rank = script.text(device)
        if device is None or not _GLOBAL_RANK.fullmatch(rank) or not is_rank(script, device):
            continue
        bindings = script.lookup(dotted(device), device)
        values = " ".join(script.text(binding.value) for binding in bindings)
        if not re.search(r"local|%", values, re.IGNORECASE):
            fix = "local_rank" if script.lookup("local_rank", device) else None
            yield Problem(device, {"rank": rank}, fix)


def _devices(script: Script) -> Iterator[Value]:
    """Yield the expressions that select a device."""
    for node in script.nodes:
        match node:
            case ast.Call(ast.Attribute(attr="to" | "cuda" | "set_device")):
                yield argument(node, "device", 0)
            case ast.Call(ast.Attribute(attr="device")):
                yield argument(node, "index", 1)
            case ast.keyword("output_device", device) | ast.keyword(
                "device_ids", ast.List([device])
            ):
                yield device
            case ast.JoinedStr([ast.Constant("cuda:"), ast.FormattedValue(device)]):
                yield device


def device_not_set(script: Script) -> Iterator[Problem]:
    if _SELECTS_DEVICE.search(script.source):
        return
    for call in script.all(ast.Call):
        tensor = argument(call, "tensor", 0)
        if tensor is None or not collective(script, call).startswith("dist."):
            continue
        made = script.definition(tensor) or tensor
        if isinstance(made, ast.Call) and _is_on_cuda(script, made):
            yield Problem(call, {"tensor": script.text(tensor)})


def _is_on_cuda(script: Script, call: ast.Call) -> bool:
    """Whether a call makes a tensor on the current GPU: `device="cuda"`, `.to("cuda")`, `.cuda()`."""
    device = argument(call, "device", 0 if last_name(call) == "to" else -1)
    if last_name(call) == "cuda" and not call.args:
        return True
    if device is not None:
        device = script.definition(device) or device
    if isinstance(device, ast.IfExp):
        device = device.body
    return script.text(device) in ("'cuda'", "torch.device('cuda')")
