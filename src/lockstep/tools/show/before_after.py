"""Show what every rank holds before and after a collective. The named schedule is run in one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from lockstep.collectives import REDUCING, Kind, algorithms_of, in_process
from lockstep.errors import UsageError

_ROOTED = ("reduce", "broadcast", "scatter", "gather")
_USUAL = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "all_to_all": "direct",
}
_NOTHING = "nothing"


def before_and_after(
    kind: Kind,
    rows: Sequence[Sequence[float]],
    *,
    op: str = "sum",
    algorithm: str | None = None,
    root: int = 0,
) -> str:
    """Return one line per rank. Row r is rank r's tensor. In a scatter it is the piece that the
    root has for rank r; in an all-to-all it has one element for each rank.

    Raises UsageError for rows that do not fit together, and for an unknown root or algorithm.
    """
    _check(kind, rows, algorithm, root)
    integers = all(isinstance(number, int) for number in chain(*rows))
    dtype = torch.int64 if integers else torch.float64
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    name = algorithm or _USUAL.get(kind, "tree")
    before = [_shown(tensor) for tensor in tensors]
    if kind == "scatter":
        before = [_NOTHING] * len(rows)
        before[root] = _shown(tensors)
    after = _run(kind, tensors, op, name, root)
    title = _dashed(kind)
    if kind in REDUCING:
        title += f", {op}"
    if kind in _ROOTED:
        title += f", root {root}"
    width = max(map(len, [*before, "before"]))
    lines = [f"{title}, by {_dashed(name)}", f"        {'before':<{width}}    after"]
    for rank, value in enumerate(after):
        lines.append(f"rank {rank}  {before[rank]:<{width}}    {_shown(value)}")
    return "\n".join(lines)


def _check(kind: Kind, rows: Sequence[Sequence[float]], algorithm: str | None, root: int) -> None:
    world = len(rows)
    if not 0 <= root < world:
        raise UsageError("root-outside-group", root=root, size=world, last=world - 1)
    lengths = [len(row) for row in rows]
    if kind in (*REDUCING, "broadcast") and len(set(lengths)) > 1:
        raise UsageError("rows-not-equal", lengths=lengths, collective=_dashed(kind))
    if algorithm is not None:
        known = [_dashed(name) for name in algorithms_of(kind) if name != "hierarchical"]
        if _dashed(algorithm) not in known:
            raise UsageError(
                "unknown-choice", name="algorithm", value=_dashed(algorithm), choices=known
            )
    if kind == "all_to_all" and set(lengths) != {world}:
        raise UsageError("one-number-per-rank", ranks=world)


def _run(
    kind: Kind, tensors: list[torch.Tensor], op: str, name: str, root: int
) -> Sequence[object]:
    own: Any = [tensor.clone() for tensor in tensors]
    if kind == "all_to_all":
        own = [tensor.split(1) for tensor in own]
    options: dict[str, Any] = {"algorithm": name}
    if kind in REDUCING:
        options["op"] = op
    if kind in _ROOTED:
        options["root"] = root
    result: Sequence[Any] = getattr(in_process, kind)(own, **options)
    if kind == "gather":
        after: list[object] = [_NOTHING] * len(own)
        after[root] = result
        return after
    return [torch.cat(pieces) for pieces in result] if kind == "all_to_all" else result


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"[{' '.join(map(_number, value.tolist()))}]"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
