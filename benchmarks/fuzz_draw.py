"""The cases of benchmarks/fuzz.py, drawn from seeds. What torch cannot train is not drawn."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from fuzz_case import STEPPERS, Case, Windows
from fuzz_models import BLOCKS, CYCLED, FUSED, OPTIMIZERS, SCHEDULES

WRAPPERS = ("wrapper", "join", "sharded optimizer", "hook", "backend")
_DOORS = (*STEPPERS * 4, *WRAPPERS, "wrapper")
_REDUCES = ("native", "central", "ring", "tree", "halving_doubling", "shared_memory")


def drawn(seed: int) -> Case:
    """Return the case of a seed."""
    chance = Random(seed)
    ranks = chance.choice((1, 2, 2, 3, 3, 4))
    door = chance.choice(_DOORS)
    idle = chance.random() < 0.45
    stepper = door in STEPPERS
    options = _stepper_options(chance, door, ranks) if stepper else _wrapper_options(chance, door)
    values = _training(chance, door, options)
    sizes, windows = _windows(chance, door, ranks, idle=idle, local="sync_every" in options)
    samples = sizes.get("samples", 0)
    for window in windows:
        samples = max(samples, *(each.stop for micros in window for each in micros))
    values |= _events(chance, door, values, options, len(windows), samples)
    return Case(
        seed=seed,
        ranks=ranks,
        door=door,
        windows=windows,
        samples=samples,
        sizes=sizes,
        options=options,
        **values,
    )


def _training(chance: Random, door: str, options: dict[str, Any]) -> dict[str, Any]:
    dtype = chance.choice((torch.float64,) * 6 + (torch.float32,) * 3 + (torch.bfloat16,))
    optimizer = chance.choice(tuple(OPTIMIZERS))
    divided = options.get("update") in ("sharded", "server")
    refused = ("lbfgs", "sparse adam", *(("adafactor", "muon") if divided else ()))
    if optimizer in refused and chance.random() < 0.8:
        optimizer = "sgd, momentum"
    blocks = tuple(chance.choice(BLOCKS) for _ in range(chance.randrange(4)))
    zeros = any("norm" in block for block in blocks)  # gradients that are 0 but for rounding
    if optimizer == "rprop" and (zeros or dtype is not torch.float64):
        optimizer = "adamw"  # rprop looks at signs
    if dtype is torch.bfloat16:
        blocks = tuple(each for each in blocks if each not in ("complex",))
    if door != "stepper, loader" or "sync_every" in options:  # noise that one rank draws too
        blocks = tuple(each for each in blocks if each != "dropout")
    if door == "hook" or door == "backend":  # torch's wrapper cannot
        blocks = tuple(each for each in blocks if each != "checkpoint, reentrant")
    if optimizer == "sparse adam":
        blocks = ()
    if optimizer == "adafactor":  # it divides by the number of elements, and takes no complex ones
        blocks = tuple(each for each in blocks if each not in ("odd", "complex"))
    has_sparse = any("sparse" in each for each in blocks)
    if has_sparse and door not in STEPPERS:  # torch's optimizers of sparse gradients
        optimizer = chance.choice(("sgd", "adagrad"))
    flags: dict[str, Any] = {}
    if optimizer not in ("adafactor", "muon", "lbfgs", "sparse adam") and chance.random() < 0.5:
        flags["foreach"] = chance.random() < 0.5
    plain = not has_sparse and "complex" not in blocks
    # torch 2.13: fused SGD with momentum of bfloat16 on a CPU is wrong
    if optimizer in FUSED and plain and dtype is not torch.bfloat16 and chance.random() < 0.4:
        flags = {"fused": True}
    schedules = [name for name in SCHEDULES if name != "one cycle" or optimizer in CYCLED]
    return {
        "dtype": dtype,
        "optimizer": optimizer,
        "blocks": blocks,
        "flags": flags,
        "groups": 1 if optimizer == "lbfgs" else chance.choice((1, 1, 2)),
        "schedule": chance.choice((None, *schedules)),
        "clip": chance.choice((None, None, 0.05, 1.0, float("inf"))),
        "weighing": chance.choice(("count", "count", "shares", "tensor", "mean")),
        "penalty": "checkpoint, reentrant" not in blocks
        and "attention" not in blocks  # torch has no second derivative of it
        and optimizer != "sparse adam"
        and dtype is not torch.bfloat16  # in 8 bits its rounding is as large as itself
        and chance.random() < 0.08,
    }


def _stepper_options(chance: Random, door: str, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kind = chance.choice(
        ("plain", "plain", "sharded", "exact", "exact", "local", "compress", "server")
    )
    loops = kind in ("exact", "server") and door != "stepper, loader"
    if loops and (chance.random() < 0.95 or kind == "server"):
        kind = chance.choice(("plain", "sharded"))
    if kind in ("plain", "sharded", "local") and chance.random() < 0.6:
        found["reduce"] = chance.choice(_REDUCES)
    if kind == "sharded" or (kind in ("exact", "compress") and chance.random() < 0.4):
        found["update"] = "sharded"
        found["weights"] = chance.choice(("auto", "shared", "separate"))
    if kind == "exact":
        found["exact"] = True
        found["reduce"] = chance.choice(("auto", "auto", "native", "shared_memory"))
        if ranks > 1 and chance.random() < 0.3:
            found["witness"] = chance.choice((0.5, 1.0))
    elif kind == "local":
        found["sync_every"] = chance.choice((1, 2, 3))
        found["outer"] = chance.choice(
            (
                None,
                "average",
                "nesterov",
                "average:after=2",
                "nesterov:lr=0.5",
                "nesterov:fragments=2",
            )
        )
        if found["sync_every"] == 1 and "fragments" in str(found["outer"]):
            found["sync_every"] = 2
    elif kind == "compress":
        found["compress"] = chance.choice(("bf16", "fp16", "int8", "powersgd:2"))
    elif kind == "server":
        found["update"], found["staleness"] = "server", 0
    found["unused"] = chance.choice(("error", "zeros", "zeros", "skip", "skip"))
    if kind == "server" and chance.random() < 0.95:
        found["unused"] = "zeros"
    if chance.random() < 0.04:  # most likely refused
        found |= chance.choice(
            (
                {"exact": True},
                {"compress": "bf16"},
                {"sync_every": 2},
                {"reduce": "ring"},
                {"update": "sharded"},
            )
        )
    found["checks"] = chance.choice(("full", "full", "start", "off"))
    found["trace_nonfinite"] = chance.random() < 0.2
    if chance.random() < 0.5:
        found["bucket_mb"] = chance.choice((1e-5, 2e-4, 1e-3))
    return found


def _wrapper_options(chance: Random, door: str) -> dict[str, Any]:
    found: dict[str, Any] = {"find_unused_parameters": chance.random() < 0.7}
    if chance.random() < 0.5:
        found["bucket_cap_mb"] = chance.choice((1e-5, 2e-4, 1e-3))
    elif chance.random() < 0.2:
        found["bucket_cap_mb_list"] = [1e-5, 2e-4]
    if door in ("hook", "backend"):
        return found | {"find_unused_parameters": True}
    if chance.random() < 0.6:
        found["reduce"] = chance.choice(_REDUCES)
    found["checks"] = chance.choice(("full", "full", "start", "off"))
    if chance.random() < 0.2:
        found["forward_sync_buffers"] = False
    if chance.random() < 0.2:
        found["static_graph"] = True
    return found


def _windows(
    chance: Random, door: str, ranks: int, *, idle: bool, local: bool
) -> tuple[dict[str, Any], Windows]:
    """Return the Loader's sizes, and the samples of each micro-batch, by step and rank."""
    if door == "stepper, loader":
        slots = chance.randrange(1, max(2, ranks)) if idle else chance.randrange(1, 9)
        micro = chance.randrange(1, 5)
        # the last micro-batch of a step may be smaller
        total = max(
            micro, slots * micro - (chance.randrange(micro) if chance.random() < 0.3 else 0)
        )
        samples = chance.randrange(total, total * 4 + 1)
        sizes: dict[str, Any] = {
            "samples": samples,
            "global_batch": total,
            "micro_batch": micro,
            "epochs": chance.choice((1, 1, 2)),
        }
        if chance.random() < 0.15:
            sizes["drop_last"], samples = True, samples - samples % total
        if ranks > 1 and chance.random() < 0.1 and not local:
            sizes["balance"] = [chance.choice((1, 2, 3)) for _ in range(ranks)]
        return sizes, _of_loader(samples, total, micro, ranks) * sizes["epochs"]
    begin, windows = 0, []
    steps = chance.randrange(3, 7)
    # join(): a rank has inputs for some of the steps, one rank for all
    ends = [chance.randrange(1, steps + 1) for _ in range(ranks)]
    ends[chance.randrange(ranks)] = steps
    for step in range(steps):
        busy = [True] * ranks
        even = chance.randrange(1, 4)
        if door in STEPPERS and idle:
            busy = [chance.random() < 0.5 for _ in range(ranks)]
            busy[chance.randrange(ranks)] = True
        if door == "join":
            busy, even = [step < last for last in ends], 1
        window = []
        for rank in range(ranks):
            micros = []
            count = even if door in WRAPPERS else chance.randrange(1, 4)
            for _ in range(count * busy[rank]):
                size = chance.randrange(1, 5)
                micros.append(range(begin, begin + size))
                begin += size
            window.append(tuple(micros))
        windows.append(tuple(window))
    return {}, tuple(windows)


def _of_loader(samples: int, total: int, micro: int, ranks: int) -> Windows:
    """The cut that docs/guide/data.md describes."""
    slots = -(-total // micro)
    each, more = divmod(slots, ranks)
    windows = []
    for start in range(0, samples, total):
        stop = min(start + total, samples)
        cut = [
            range(start + slot * micro, min(start + slot * micro + micro, stop))
            for slot in range(slots)
        ]
        shares, begin = [], 0
        for rank in range(ranks):
            count = each + (rank < more)
            shares.append(tuple(part for part in cut[begin : begin + count] if part))
            begin += count
        windows.append(tuple(shares))
    return tuple(windows)


def _events(
    chance: Random,
    door: str,
    values: dict[str, Any],
    options: dict[str, Any],
    steps: int,
    samples: int,
) -> dict[str, Any]:
    """What happens on the way."""
    frozen: dict[int, tuple[int, bool]] = {}
    blocks, stepper = values["blocks"], door in STEPPERS
    server = options.get("update") == "server"
    if (
        blocks
        and steps > 2
        and door not in ("hook", "backend", "join")
        and not server
        and chance.random() < 0.3
    ):
        block = chance.randrange(len(blocks))
        first = chance.randrange(steps - 1)
        frozen[first] = (block, False)
        if chance.random() < 0.7:
            frozen[chance.randrange(first + 1, steps)] = (block, blocks[block] != "frozen")
    if frozen or "branches" in blocks:  # static_graph promises that no backward differs
        options.pop("static_graph", None)
    own = stepper and not options.keys() & {
        "reduce",
        "bucket_mb",
        "exact",
        "compress",
        "sync_every",
    }
    own = own and not server
    alone = options.get("sync_every") is not None or server
    resumes = stepper and not any(name in options for name in ("sync_every", "compress", "witness"))
    resumes = resumes and not server and "dropout" not in blocks
    reload = (
        chance.randrange(1, steps) if resumes and steps > 1 and chance.random() < 0.15 else None
    )
    shares = stepper and values["weighing"] in ("shares", "tensor")
    return {
        "frozen": frozen,
        "by_hand": not stepper or (not server and chance.random() < 0.3),
        "reload": reload,
        "average": stepper
        and reload is None
        and (not alone or chance.random() < 0.05)
        and chance.random() < 0.1,
        # torch has no kernel that scales complex gradients
        "scaled": stepper
        and "complex" not in blocks
        and (not alone or chance.random() < 0.05)
        and chance.random() < 0.1,
        "by_all": chance.random() < 0.5,
        "wrapped": own and chance.random() < 0.4,
        "poisoned": (chance.randrange(samples),) if stepper and chance.random() < 0.06 else (),
        "empty": chance.randrange(steps) if shares and chance.random() < 0.15 else None,
        "set_to_none": stepper or chance.random() < 0.7,
    }
