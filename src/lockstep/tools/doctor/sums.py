"""Do collectives give what they must? Each rank has other data, and every result is computed
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep import collectives
from lockstep.collectives.group import Group
from lockstep.tools.finding import Finding, judged

_ELEMENTS = 10_007  # divides by nothing


def wrong(group: Group, device: torch.device, algorithms: Sequence[str]) -> list[str]:
    """What came out wrong on any rank, such as "all_reduce by native". All members call it, and
    all have the result.
    """
    names = [
        (kind, algorithm)
        for algorithm in algorithms
        for kind in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
    ]
    bad = torch.tensor(
        [float(_differs(group, device, kind, algorithm)) for kind, algorithm in names],
        device=device,
    )
    group.all_reduce(bad, "max").wait()
    return [
        f"{kind} by {algorithm}"
        for (kind, algorithm), flag in zip(names, bad.tolist(), strict=True)
        if flag
    ]


def _differs(group: Group, device: torch.device, kind: str, algorithm: Any) -> bool:
    size = group.size
    # Sums of small integers are exact.
    pattern = torch.arange(_ELEMENTS, dtype=torch.float32, device=device).remainder_(61)
    everyone = [pattern * (rank + 1) + rank for rank in range(size)]
    mine, total = everyone[group.rank].clone(), torch.stack(everyone).sum(0)
    found: Tensor
    if kind == "all_reduce":
        found, expected = collectives.all_reduce(mine, algorithm=algorithm, group=group), total
    elif kind == "broadcast":
        found = collectives.broadcast(mine, size - 1, algorithm=algorithm, group=group)
        expected = everyone[-1]
    elif kind == "all_gather":
        found = collectives.all_gather(mine, algorithm=algorithm, group=group)
        expected = torch.cat(everyone)
    else:
        found = collectives.reduce_scatter(mine, algorithm=algorithm, group=group)
        expected = total.tensor_split(size)[group.rank]
    return not torch.equal(found, expected)


def judge(bad: Sequence[str], algorithms: Sequence[str], members: int, what: str) -> Finding:
    """`what`: rank or host."""
    value = (
        f"all_reduce, broadcast, all_gather, reduce_scatter over {members}"
        f" {what}{'s' * (members != 1)} by {' and '.join(algorithms)}"
    )
    why = (
        f"{', '.join(bad)} gave wrong numbers: do not train here; test the memory and the network"
        " card, and try another torch"
        if bad
        else ""
    )
    return judged("sums", value, fix=why)
