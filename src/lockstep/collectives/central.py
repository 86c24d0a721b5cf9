"""All-reduce through rank 0, one tensor at a time: the readable reference beside the fast one.

Every rank sends its tensor to rank 0, which adds them in the order of ranks and sends the result
back. That is all an all-reduce has to do; it is slow because rank 0 receives and sends (W - 1)
times the data, one rank after the other, while the rest wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.collectives.group import Group, Op, check_op

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,
    "prod": Tensor.mul_,
    "max": lambda a, b: torch.maximum(a, b, out=a),
    "min": lambda a, b: torch.minimum(a, b, out=a),
}


def central_all_reduce(
    group: Group, tensor: Tensor, op: Op = "sum", place: str | None = None
) -> None:
    """Replace `tensor` on every rank by the sum (mean, max, min, product) over all ranks. Returns
    when it is done.

    Rank 0 sends and receives (W - 1) messages of the whole tensor, every other rank one each way.
    The order of addition is ((t0 + t1) + t2) + ..., whatever the timing.
    """
    check_op(op, tensor)
    # each message is counted as it is sent
    group.announce("all_reduce", tensor, f"{op} through rank 0", place, sends=0)
    group.wait_for_all(group.number)
    if group.size == 1 or tensor.numel() == 0:
        return
    total = tensor.contiguous()
    if group.rank == 0:
        arrived = torch.empty_like(total)
        for rank in range(1, group.size):
            group.receive(arrived, rank)
            _COMBINE[op](total, arrived)
        if op == "mean":
            total.div_(group.size)
        for rank in range(1, group.size):
            group.send(total, rank)
    else:
        group.send(total, 0)
        group.receive(total, 0)
    if total is not tensor:
        tensor.copy_(total)
    group.ended(group.number)
