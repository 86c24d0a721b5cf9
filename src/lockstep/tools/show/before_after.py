"""Show what every rank holds before and after a collective. The named schedule is run in one
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.collectives import in_process
from lockstep.collectives.algorithms import algorithms_of
from lockstep.collectives.schedule import REDUCING, Kind
from lockstep.config.knob import chosen
from lockstep.errors import UsageError

_ROOTED = ("reduce", "broadcast", "scatter", "gather")
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
    whole = all(isinstance(number, int) for row in rows for number in row)
    tensors = [torch.tensor(row, dtype=torch.int64 if whole else torch.float64) for row in rows]
    usual = {
        "all_reduce": "ring",
        "all_gather": "ring",
        "reduce_scatter": "ring",
        "all_to_all": "direct",
    }
    name = algorithm or usual.get(kind, "tree")
    before = (
        [tensors if rank == root else _NOTHING for rank in range(len(rows))]
        if kind == "scatter"
        else tensors
    )
    shown = [_shown(value) for value in before]
    after = _run(kind, tensors, op, name, root)
    how = (f", {op}" if kind in REDUCING else "") + (f", root {root}" if kind in _ROOTED else "")
    width = max(map(len, [*shown, "before"]))
    lines = [f"{_dashed(kind)}{how}, by {_dashed(name)}", f"        {'before':<{width}}    after"]
    for rank, (left, value) in enumerate(zip(shown, after, strict=True)):
        lines.append(f"rank {rank}  {left:<{width}}    {_shown(value)}")
    return "\n".join(lines)


def _check(kind: Kind, rows: Sequence[Sequence[float]], algorithm: str | None, root: int) -> None:
    world = len(rows)
    if not 0 <= root < world:
        raise UsageError("root-outside-group", root=root, size=world, last=world - 1)
    if kind in (*REDUCING, "broadcast") and len({len(row) for row in rows}) > 1:
        raise UsageError(
            "rows-not-equal", lengths=[len(row) for row in rows], collective=_dashed(kind)
        )
    known = [each for each in algorithms_of(kind) if each != "hierarchical"]
    if algorithm is not None:
        chosen("algorithm", _dashed(algorithm), map(_dashed, known))
    if kind == "all_to_all" and any(len(row) != world for row in rows):
        raise UsageError("one-number-per-rank", ranks=world)


def _run(
    kind: Kind, tensors: list[torch.Tensor], op: str, name: str, root: int
) -> Sequence[object]:
    own: Any = [tensor.clone() for tensor in tensors]
    if kind == "all_to_all":
        own = [tensor.split(1) for tensor in own]
    given = ({"op": op} if kind in REDUCING else {}) | ({"root": root} if kind in _ROOTED else {})
    found: Sequence[Any] = getattr(in_process, kind)(own, algorithm=name, **given)
    if kind == "gather":
        return [found if rank == root else _NOTHING for rank in range(len(own))]
    return [torch.cat(pieces) for pieces in found] if kind == "all_to_all" else found


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"[{' '.join(str(number) if isinstance(number, int) else f'{number:g}' for number in value.tolist())}]"
    return " ".join(_shown(each) for each in value) if isinstance(value, list) else str(value)
